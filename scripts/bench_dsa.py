#!/usr/bin/env python3
"""Time the DSA operations on this GPU: ours, the best public kernels, stock Megatron, and the floor.

    PYTHONPATH=src python scripts/bench_dsa.py --out docs/reports/<date>-h200

Medians of CUDA-event times after warm-up, all peers in one run on the same random inputs; what is compared
are ratios. Public: FlashMLA forward (sgl-flash-mla, use_legacy, heads padded beforehand) and the cuDNN
frontend's DSA kernels, put together as they come. Stock: megatron-core's tilelang backend; left out where
tilelang is not importable. Floor: useful FLOPs over the measured matrix rate. Writes bench.json, bench.md and
bench.png (with matplotlib) under --out.
"""

# ruff: noqa: ANN401, D102, D103, PLC0415  # peers without types, imported only where present; rows are named after what they time
from __future__ import annotations

import argparse
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv32.dsa import attention, gpu, loss, plan, report, selection
from dsv32.dsa.report import Row
from dsv32.dsa.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

SCALE, TOPK, BF16 = 192**-0.5, 2048, torch.bfloat16
SETTINGS = Settings(strict=True)


@dataclass
class Bench:
    """Collects rows; a failing peer leaves an empty cell and its error in the log."""

    repeats: int = 7
    rate: float = 0.0
    copy: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def time(self, what: str, run: Callable[[], Any], repeats: int | None = None) -> float | None:
        try:
            for _ in range(2):
                run()
            torch.cuda.synchronize()
            times = []
            for _ in range(repeats or self.repeats):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end))
            return sorted(times)[len(times) // 2]
        except Exception as exc:  # a peer that cannot run is a result, not the end of the run
            print(f"-- {what}: {exc!r}"[:400], flush=True)
            traceback.print_exc(limit=3)
            return None
        finally:
            torch.cuda.empty_cache()

    def peak(self, run: Callable[[], Any]) -> float:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**30

    def floor(self, flops: float) -> float | None:
        return flops / self.rate / 1e9 if self.rate else None

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(row.line(), flush=True)


@dataclass(kw_only=True)
class Case:
    """Random inputs of one layer; indices come from the indexer's own selection."""

    heads: int
    sq: int
    sk: int

    def __post_init__(self) -> None:
        def rand(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, device="cuda") * scale).to(BF16)

        sq, sk, heads = self.sq, self.sk, self.heads
        self.bounds = plan.causal_bounds(sq, sk, torch.device("cuda"))
        self.q, self.kv, self.dout = (
            rand(sq, heads, 576, scale=0.3),
            rand(sk, 576, scale=0.3),
            rand(sq, heads, 512),
        )
        self.iq, self.ik, self.iw = rand(sq, 64, 128), rand(sk, 128), rand(sq, 64, scale=0.01)
        self.indices, self.picked = selection.select(self.iq, self.ik, self.iw, self.bounds, TOPK, SETTINGS)
        self.out, self.lse = gpu.forward(self.q, self.kv, self.indices, SCALE)

    @property
    def shape(self) -> str:
        return f"H={self.heads} {self.sq}x{self.sk}"

    @property
    def chosen(self) -> int:
        """Chosen (row, key) pairs."""
        return int((self.indices >= 0).sum())

    @property
    def visible(self) -> int:
        """Visible (row, key) pairs."""
        return int(self.bounds.lengths().sum(dtype=torch.int64))

    def inputs(self) -> loss.LossInputs:
        return loss.LossInputs(
            query=self.q,
            kv=self.kv,
            scale=SCALE,
            bounds=self.bounds,
            lse=self.lse,
            indices=self.indices,
            picked=self.picked,
        )

    def loss(self, sparse: bool, settings: Settings) -> Any:
        run = loss.sparse_loss if sparse else loss.dense_loss
        return run(self.iq, self.ik, self.iw, self.inputs(), torch.ones((), device="cuda"), settings, True)

    def layer(self, settings: Settings) -> None:
        """Ours: selection, attention, sparse loss, all gradients."""
        q, kv = self.q.detach().requires_grad_(), self.kv.detach().requires_grad_()
        iq, ik, iw = (t.detach().requires_grad_() for t in (self.iq, self.ik, self.iw))
        indices, picked = selection.select(iq, ik, iw, self.bounds, TOPK, settings)
        out, lse = attention.attend(q, kv, indices, SCALE, 512, settings, self.bounds)
        inputs = loss.LossInputs(
            query=self.q,
            kv=self.kv,
            scale=SCALE,
            bounds=self.bounds,
            lse=lse,
            indices=indices,
            picked=picked,
        )
        factor = torch.full((), 1 / self.sq, device="cuda")
        kl = loss.indexer_loss(iq, ik, iw, inputs, factor, True, settings)
        torch.autograd.backward([out, kl], [self.dout, torch.ones_like(kl)])


DETERMINISTIC = Settings(strict=True, deterministic=True)


class Public:
    """The best public kernels, composed as they come."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.dsa: Any = gpu.cudnn_dsa()
        self.flash: Any = gpu.flash_mla()
        full = 64 if case.heads <= 64 else 128
        self.padded = gpu.pad_heads(case.q, full)
        self.length = (case.indices >= 0).sum(-1, dtype=torch.int32)
        self.sink = torch.full((case.heads,), float("-inf"), device="cuda")
        self.offset = case.sk - case.sq
        self.rows = max(1, min(case.sq, (1 << 31) // (4 * case.sk)))

    def topk(self) -> Tensor:
        c = self.case
        out = torch.empty(c.sq, TOPK, device="cuda", dtype=torch.int32)
        for lo in range(0, c.sq, self.rows):
            hi = min(lo + self.rows, c.sq)
            scores = gpu.causal_scores(c.iq[lo:hi], c.ik, c.iw[lo:hi], self.offset + lo)
            length = (torch.arange(lo, hi, device="cuda") + self.offset + 1).int()
            got = self.dsa.indexer_top_k_wrapper(
                scores, length, TOPK, next_n=1, return_val=False, tie_break=1
            )
            out[lo:hi] = got["indices"]
        return out

    def forward(self) -> Any:
        c = self.case
        return self.flash.flash_mla_sparse_fwd(
            self.padded, c.kv[:, None], c.indices[:, None], SCALE, use_legacy=True
        )

    def backward(self) -> Any:
        c = self.case
        return self.dsa.sparse_attention_backward_wrapper(
            c.q,
            c.kv,
            c.out,
            c.dout,
            c.lse,
            self.sink,
            c.indices,
            softmax_scale=SCALE,
            topk_length=self.length,
        )

    def loss(self) -> Any:
        c = self.case
        idx = c.indices[None]
        target = self.dsa.sparse_attn_score_recompute_wrapper(
            c.q[None], c.kv[None], c.lse[None], idx, softmax_scale=SCALE, qhead_per_kv_head=c.heads
        )["target"]
        predict = self.dsa.sparse_indexer_score_recompute_wrapper(
            c.iq[None], c.ik[None], c.iw[None], idx, qhead_per_kv_head=64
        )
        one = torch.ones(1, device="cuda")
        return self.dsa.indexer_backward_wrapper(
            c.iq[None], c.iw[None], c.ik[None], target, predict["predict"], idx, one
        )


class Stock:
    """megatron-core 0.19.2's tilelang backend."""

    def __init__(self, case: Case) -> None:
        from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa
        from megatron.core.transformer.experimental_attention_variant.ops.sparse_mla import SparseMLA

        if SparseMLA is None:
            raise RuntimeError("megatron-core could not import its tilelang kernels")
        self.case, self.ops, self.mla = case, tilelang_dsa, SparseMLA
        self.q = case.q[None].clone().requires_grad_()
        self.kv = case.kv[None, :, None].clone().requires_grad_()
        self.idx = case.indices[None, :, None].contiguous()
        group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        self.groups = SimpleNamespace(tp=group, cp=group)
        self.leaves = [t[:, None].clone().requires_grad_() for t in (case.iq, case.ik, case.iw)]

    def forward(self) -> Any:
        with torch.no_grad():
            return self.mla.apply(self.q, self.kv, self.idx, SCALE)

    def both(self) -> None:
        self.q.grad = self.kv.grad = None
        out, _ = self.mla.apply(self.q, self.kv, self.idx, SCALE)
        out.backward(self.case.dout[None])

    def topk(self) -> Any:
        q, k, w = (t.detach() for t in self.leaves)
        return self.ops.run_fused_qk_topk(q, k, w, TOPK, self.case.bounds.starts, self.case.bounds.ends, 8192)

    def topk_loss(self) -> None:
        c = self.case
        q, k, w = self.leaves
        for t in self.leaves:
            t.grad = None
        got = self.ops.run_fused_qk_topk_with_loss(
            q=q,
            k=k,
            weights=w,
            index_topk=TOPK,
            starts=c.bounds.starts,
            ends=c.bounds.ends,
            block_size=8192,
            query=c.q[:, None],
            key=c.kv[:, None, None],
            softmax_scale=SCALE,
            loss_coeff=1.0,
            pg_collection=self.groups,
        )
        got[1].backward()

    def layer(self) -> None:
        self.topk_loss()
        self.both()


def attention_rows(b: Bench, case: Case, stock: Stock | None) -> None:
    public = Public(case)
    with torch.no_grad():
        b.add(
            Row(
                operation="attention forward",
                shape=case.shape,
                ours=b.time("ours", lambda: gpu.forward(case.q, case.kv, case.indices, SCALE)),
                public=b.time("public", public.forward),
                stock=b.time("stock", stock.forward) if stock else None,
                floor=b.floor(2 * case.chosen * case.heads * 1088),
            )
        )

    def ours(settings: Settings, way: str | None = None) -> Any:
        return attention.attention_backward(
            case.q,
            case.kv,
            case.indices,
            case.out,
            case.lse,
            case.dout,
            SCALE,
            settings,
            case.bounds,
            way=way,
        )

    whole = b.time("stock", stock.both, 5) if stock else None
    fwd = b.time("stock", stock.forward, 5) if stock else None
    b.add(
        Row(
            operation="attention backward",
            shape=case.shape,
            ours=b.time("ours", lambda: ours(SETTINGS)),
            deterministic=b.time("tiles", lambda: ours(DETERMINISTIC)),
            public=b.time("public", public.backward),
            stock=whole - fwd if whole and fwd else None,
            floor=b.floor(2 * case.chosen * case.heads * (3 * 576 + 2 * 512)),
            peak=b.peak(lambda: ours(SETTINGS)),
            note=attention.choose_backward(case.q, case.kv, case.indices, SETTINGS),
        )
    )


def indexer_rows(b: Bench, case: Case, stock: Stock | None) -> None:
    public = Public(case)

    def ours() -> Any:
        return selection.select(case.iq, case.ik, case.iw, case.bounds, TOPK, SETTINGS)

    b.add(
        Row(
            operation="indexer scores + top-k",
            shape=f"{case.sq}x{case.sk}",
            ours=b.time("ours", ours, 5),
            public=b.time("public", public.topk, 5),
            stock=b.time("stock", stock.topk, 3) if stock else None,
            floor=b.floor(2 * case.visible * 64 * 128),
            peak=b.peak(ours),
        )
    )


def sparse_loss_rows(b: Bench, case: Case, stock: Stock | None) -> None:
    public = Public(case)

    def ours(settings: Settings = SETTINGS) -> None:
        selection.select(case.iq, case.ik, case.iw, case.bounds, TOPK, settings)
        case.loss(True, settings)

    flops = 2 * case.visible * 64 * 128 + 2 * case.chosen * (case.heads * 576 + 3 * 64 * 128)
    b.add(
        Row(
            operation="indexer + top-k + sparse KL, forward + backward",
            shape=case.shape,
            ours=b.time("ours", ours, 5),
            deterministic=b.time("deterministic", lambda: ours(DETERMINISTIC), 3),
            public=b.time("public", lambda: (public.topk(), public.loss()), 5),
            stock=b.time("stock", stock.topk_loss, 3) if stock else None,
            floor=b.floor(flops),
            peak=b.peak(ours),
        )
    )


def dense_loss_rows(b: Bench, case: Case, reference: bool) -> None:
    flops = 2 * case.visible * (2 * case.heads * 576 + 4 * 64 * 128)
    stock = None
    if reference:
        stock = b.time("stock reference", stock_dense(case), 1)
    b.add(
        Row(
            operation="dense KL, forward + backward",
            shape=case.shape,
            ours=b.time("ours", lambda: case.loss(False, SETTINGS), 3),
            stock=stock,
            floor=b.floor(flops),
            peak=b.peak(lambda: case.loss(False, SETTINGS)),
        )
    )


def fp8_rows(b: Bench, case: Case) -> None:
    """Selection with fp8 scores, and how it and the sparse loss differ from bf16's (random inputs)."""
    fp8 = Settings(strict=True, indexer="fp8")

    def ours(settings: Settings) -> Any:
        return selection.select(case.iq, case.ik, case.iw, case.bounds, TOPK, settings)

    ms, bf16 = (b.time(s.indexer, lambda s=s: ours(s), 5) for s in (fp8, SETTINGS))
    indices, picked = ours(fp8)
    kept = 0
    for lo in range(0, case.sq, 1024):
        rows = slice(lo, lo + 1024)
        marks = torch.zeros(indices[rows].size(0), case.sk + 1, dtype=torch.bool, device="cuda")
        marks.scatter_(1, torch.where(indices[rows] < 0, case.sk, indices[rows]).long(), True)
        had = case.indices[rows]
        kept += int((torch.gather(marks, 1, had.clamp_min(0).long()) & (had >= 0)).sum())
    differ = 100 * (1 - kept / case.chosen)
    one = torch.ones((), device="cuda")
    lse = gpu.forward(case.q, case.kv, indices, SCALE)[1]
    inputs = replace(case.inputs(), indices=indices, picked=picked, lse=lse)
    kl = [
        float(loss.sparse_loss(case.iq, case.ik, case.iw, i, one, SETTINGS, False)[0]) / case.sq
        for i in (case.inputs(), inputs)
    ]
    note = (
        f"bf16 takes {bf16:.2f} ms; {differ:.2f} % of the chosen keys differ; KL {kl[0]:.5f}, fp8 {kl[1]:.5f}"
    )
    b.add(
        Row(
            operation="indexer scores + top-k, fp8",
            shape=f"{case.sq}x{case.sk}",
            ours=ms,
            floor=b.floor(case.visible * 64 * 128),
            note=note,
        )
    )


def stock_dense(case: Case) -> Callable[[], None]:
    """megatron-core's reference loss, the only one it has for the dense warm-up outside its cuDNN backend."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(tp=group, cp=group)
    q, k, w = (t[:, None].clone().requires_grad_() for t in (case.iq, case.ik, case.iw))
    key = case.kv[:, None, None].expand(-1, -1, case.heads, -1)
    column = torch.arange(case.sk, device="cuda")[None]
    mask = torch.zeros(case.sq, case.sk, device="cuda").masked_fill(
        column >= case.bounds.ends[:, None], float("-inf")
    )

    def run() -> None:
        q.grad = k.grad = w.grad = None
        _, kl = dsa.FusedDSAIndexerLoss.apply(
            q, w, k, case.q[:, None], key, SCALE, TOPK, 1.0, mask, False, groups
        )
        kl.backward()

    return run


def layer_rows(b: Bench, case: Case, stock: Stock | None) -> None:
    public = Public(case)
    flops = 2 * case.visible * 64 * 128 + 2 * case.chosen * (
        case.heads * (576 + 1088 + 3 * 576 + 2 * 512) + 3 * 64 * 128
    )
    b.add(
        Row(
            operation="whole layer, forward + backward",
            shape=case.shape,
            ours=b.time("ours", lambda: case.layer(SETTINGS), 5),
            deterministic=b.time("deterministic", lambda: case.layer(DETERMINISTIC), 3),
            public=b.time(
                "public", lambda: (public.topk(), public.forward(), public.backward(), public.loss()), 5
            ),
            stock=b.time("stock", stock.layer, 3) if stock else None,
            floor=b.floor(flops),
            peak=b.peak(lambda: case.layer(SETTINGS)),
        )
    )


def ceilings(b: Bench) -> None:
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    ms = b.time("product", lambda: x @ y)
    b.rate = 2 * 8192**3 / ms / 1e9 if ms else 0.0
    src = torch.empty(1 << 31, device="cuda", dtype=torch.uint8)
    dst = torch.empty_like(src)
    ms = b.time("copy", lambda: dst.copy_(src))
    b.copy = 2 * 2**31 / ms / 1e9 if ms else 0.0
    print(f"bf16 8192^3 product {b.rate:.0f} TFLOP/s, device copy {b.copy:.2f} TB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/reports/dsa"))
    parser.add_argument(
        "--sections", default="attention,indexer,fp8,sparse,dense,layer", help="comma-separated"
    )
    parser.add_argument(
        "--cases",
        default="16:8192:8192,16:4096:8192,64:4096:8192,128:4096:8192,16:8192:65536,"
        "16:8192:131072/indexer,16:16384:131072/dense",
        help="heads:queries:keys, comma-separated; heads:queries:keys/a+b limits a case to sections a and b",
    )
    parser.add_argument("--no-stock", action="store_true", help="leave megatron-core's own kernels out")
    args = parser.parse_args()
    torch.manual_seed(0)
    b = Bench()
    info = report.environment()
    print(info, flush=True)
    ceilings(b)
    print(report.HEAD, flush=True)
    sections = set(args.sections.split(","))
    for text in args.cases.split(","):
        numbers, _, only = text.partition("/")
        heads, sq, sk = map(int, numbers.split(":"))
        start = time.perf_counter()
        case = Case(heads=heads, sq=sq, sk=sk)
        if not b.rows:
            case.layer(SETTINGS)
            torch.cuda.synchronize()
            info["first use of one shape with empty caches"] = f"{time.perf_counter() - start:.1f} s"
        stock = None
        if not args.no_stock and not only:
            try:
                stock = Stock(case)
            except Exception as exc:
                print(f"-- stock is left out: {exc!r}"[:300], flush=True)
        try:
            want = set(only.split("+")) if only else sections
            if "attention" in want:
                attention_rows(b, case, stock)
            if "indexer" in want and (only or (heads == 16 and sq == 8192)):
                indexer_rows(b, case, stock)
            if "fp8" in want and (only or (heads == 16 and sq == 8192)):
                fp8_rows(b, case)
            if "sparse" in want and (only or sq == 8192):
                sparse_loss_rows(b, case, stock)
            if "dense" in want and (only or (heads == 16 and sk == 8192)):
                dense_loss_rows(b, case, reference=stock is not None and sq <= 4096)
            if "layer" in want:
                layer_rows(b, case, stock)
        finally:
            del case, stock
            torch.cuda.empty_cache()
            report.write(args.out, b.rows, info, b.rate, b.copy)


if __name__ == "__main__":
    main()
