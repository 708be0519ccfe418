"""The training run: it learns, resumes bit for bit, warms the indexer up, exports, and refuses."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import SHARE
from megatron_fixtures import run_ranks
from torch.multiprocessing import ProcessRaisedException

from dsv32.torchrun import has_libuv
from dsv32.training import checkpoint, text
from dsv32.training.errors import TrainingError
from dsv32.training.model import Parallel
from dsv32.training.report import read_metrics
from dsv32.training.settings import TrainSettings
from dsv32.training.sizes import FULL

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = Path(__file__).parent.parent / "scripts" / "run_deepseek_v3.2_5layer.py"
#: Steps over which a loss is averaged: a step has 256 tokens, of texts that differ.
WINDOW = 20
FIRST, WARMUP = 30, 20


def _shim() -> None:
    if not torch.cuda.is_available():
        from dsv32 import cpu

        cpu.install()


def _train(rank: int, device: torch.device, settings: TrainSettings) -> list[float]:
    from dsv32.training.loop import train

    _shim()
    return [result.lm_loss for result in train(device, settings)]


def _export(rank: int, device: torch.device, folder: Path, out: Path, data: Path) -> int:
    from dsv32.training.export import export

    _shim()
    return export(device, folder, out, data, "fp32")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text that ships with the system, by bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    if not text.SHIPPED_TEXT.is_dir():
        pytest.skip(f"{text.SHIPPED_TEXT} is missing: the default text ships with Debian")
    text.prepare([text.SHIPPED_TEXT], folder)
    return folder


@pytest.fixture(scope="module")
def learned(data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    """200 steps on packed documents; the settings, whose out has everything."""
    settings = TrainSettings(
        data=data,
        out=tmp_path_factory.mktemp("learned"),
        steps=200,
        sequence_length=64,
        global_batch=4,
        learning_rate=1e-2,
        kernels="dsv32.dsa",
        # The tiny model is outside what the GPU kernels cover; there the backend runs its torch path.
        kernels_strict=not torch.cuda.is_available(),
    )
    run_ranks(2, _train, settings)  # data parallel
    return settings


def test_200_steps_bring_the_loss_below_the_unigram_entropy(
    learned: TrainSettings, record_property: Callable[[str, Any], None]
) -> None:
    losses = [line.lm_loss for line in read_metrics(learned.out)]
    entropy = text.load(learned.data).unigram_entropy
    assert len(losses) == 200
    last = sum(losses[-WINDOW:]) / WINDOW
    record_property("first lm loss", losses[0])
    record_property("last lm loss", last)
    record_property("unigram entropy", entropy)
    assert last < entropy, f"{last:.3f} nats; frequencies alone give {entropy:.3f}"
    assert last < 0.6 * losses[0]
    for name in ("loss.png", "metrics.jsonl", "tensorboard"):
        assert (learned.out / name).exists()
    assert (learned.out / "loss.png").read_bytes().startswith(b"\x89PNG")


def _judge(rank: int, device: torch.device, settings: TrainSettings, pieces: torch.Tensor) -> float:
    """The last checkpoint's loss on pieces [n, s + 1], by Megatron."""
    from dsv32.training.loop import make_trainer

    _shim()
    settings.parallel.initialize()
    trainer = make_trainer(settings, text.load(settings.data), device)
    folder = checkpoint.folder_of(settings.out, settings.steps)
    checkpoint.load(folder, trainer=trainer, scheduler=None, weights_only=True)
    model = trainer.plain_model.eval()
    places = torch.arange(pieces.shape[1] - 1, device=device).expand(len(pieces), -1)
    with torch.no_grad():
        losses = model(
            input_ids=pieces[:, :-1].to(device),
            position_ids=places,
            attention_mask=None,
            labels=pieces[:, 1:].to(device),
        )
    return float(losses.double().mean())


def test_exported_model_has_the_same_loss_in_transformers(
    learned: TrainSettings, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    from transformers import AutoModelForCausalLM

    run_ranks(1, _export, checkpoint.folder_of(learned.out, learned.steps), tmp_path, learned.data)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    corpus = text.load(learned.data)
    documents = [corpus.document(n) for n in range(len(corpus)) if len(corpus.document(n)) > 129]
    pieces = torch.stack([torch.from_numpy(document[:129].astype("int64")) for document in documents])
    with torch.no_grad():
        logits = model(pieces[:, :-1], use_cache=False).logits
    theirs = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), pieces[:, 1:].flatten()).item()
    (ours,) = run_ranks(1, _judge, learned, pieces)
    record_property("loss in transformers", theirs)
    record_property("difference from Megatron", abs(ours / theirs - 1))
    # The mean over some 2,500 tokens of fp32 losses; a token selected otherwise by a rounding adds 1e-5 at
    # most.
    assert ours == pytest.approx(theirs, rel=1e-5)


RESUMED = [
    ("one-rank", 1, {}),
    ("bf16", 1, {"dtype": "bf16"}),
    ("tp2", 2, {"parallel": Parallel(tp=2)}),
    ("bf16-distributed-optimizer", 2, {"dtype": "bf16", "distributed_optimizer": True}),
    ("cp2-distributed-optimizer", 2, {"parallel": Parallel(cp=2), "distributed_optimizer": True}),
    ("pp2-vpp2-sbhd-mtp", 2, {"parallel": Parallel(pp=2, vpp=2), "layout": "sbhd", "mtp": 1}),
]


@pytest.mark.parametrize(("name", "ranks", "changes"), RESUMED, ids=[name for name, _, _ in RESUMED])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    name: str, ranks: int, changes: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    whole = TrainSettings(
        data=data,
        out=tmp_path / "whole",
        steps=4,
        save_every=2,
        sequence_length=64,
        global_batch=2,
        **changes,
    )
    losses = run_ranks(ranks, _train, whole)[0]
    again = replace(whole, out=tmp_path / "again")
    shutil.copytree(checkpoint.folder_of(whole.out, 2), checkpoint.folder_of(again.out, 2))
    assert run_ranks(ranks, _train, again)[0] == losses[2:]
    for line in read_metrics(whole.out):
        # Before it has learned anything a model is hardly better than one that knows nothing.
        assert (0.5 < line.mtp_loss / math.log(320) < 1.5) if whole.mtp else line.mtp_loss == 0


def test_an_interleaved_checkpoint_goes_on_under_other_pipelines_and_exports(
    data: Path, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    whole = TrainSettings(
        data=data,
        out=tmp_path / "interleaved",
        parallel=Parallel(pp=2, vpp=2),
        steps=4,
        save_every=2,
        sequence_length=64,
        global_batch=4,
        mtp=1,
    )
    run_ranks(2, _train, whole)
    saved = checkpoint.folder_of(whole.out, 2)
    lines = [read_metrics(whole.out)[2:]]
    for name, parallel in (("pp2", Parallel(pp=2)), ("one", Parallel())):
        more = replace(whole, out=tmp_path / name, parallel=parallel)
        shutil.copytree(saved, checkpoint.folder_of(more.out, 2))
        run_ranks(parallel.pp, _train, more)
        lines.append(read_metrics(more.out))
    for other in lines[1:]:
        for got, wanted in zip(other, lines[0], strict=True):
            for figure in ("lm_loss", "indexer_loss", "mtp_loss", "grad_norm"):
                error = abs(getattr(got, figure) / getattr(wanted, figure) - 1)
                record_property(f"{figure} step {got.step}", error)
                # As between layouts in test_matrix_model.py: the order of sums, in fp32.  The indexer's loss
                # is still 6e-5, a mean of differences of logarithms near 4, which are rounded to 2e-7.
                near = pytest.approx(getattr(wanted, figure), rel=6e-6, abs=1e-8)
                assert getattr(got, figure) == near, f"{figure}, step {got.step}"

    # Each of two further steps of Adam moves a weight by about the rate; another layer's weight is far off.
    run_ranks(1, _export, saved, tmp_path / "before", data)
    run_ranks(1, _export, checkpoint.folder_of(tmp_path / "one", 4), tmp_path / "after", data)
    before, after = _tensors(tmp_path / "before"), _tensors(tmp_path / "after")
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(value, after[name], rtol=0, atol=2 * whole.learning_rate, msg=name)


def test_a_checkpoint_of_tp2_is_refused_on_one_rank_in_one_clear_error(data: Path, tmp_path: Path) -> None:
    first = TrainSettings(
        data=data,
        out=tmp_path / "tp2",
        parallel=Parallel(tp=2),
        steps=1,
        sequence_length=64,
        global_batch=1,
    )
    run_ranks(2, _train, first)
    with pytest.raises(ProcessRaisedException, match=r"does not fit this model[^\n]*\n[^\n]*--tp 2"):
        run_ranks(1, _train, replace(first, parallel=Parallel(), steps=2))


def test_warmup_trains_the_indexer_alone_and_hands_over_to_sparse_training(
    data: Path, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    # The indexer is frozen at first, so that attention has learned something that it has not.
    first = TrainSettings(
        data=data,
        out=tmp_path / "first",
        steps=FIRST,
        sequence_length=64,
        global_batch=2,
        learning_rate=1e-2,
        indexer_loss=0.0,
    )
    run_ranks(1, _train, first)
    warmup = replace(
        first,
        out=tmp_path / "warmup",
        stage="warmup",
        steps=WARMUP,
        indexer_loss=1.0,
        load=checkpoint.folder_of(first.out, FIRST),
    )
    run_ranks(1, _train, warmup)
    lines = read_metrics(warmup.out)
    begin, end = (sum(line.indexer_loss for line in part) / 5 for part in (lines[:5], lines[-5:]))
    record_property("indexer loss at first", begin)
    record_property("indexer loss at last", end)
    assert end < 0.8 * begin, f"indexer loss {begin:.2e} to {end:.2e}"

    sparse = replace(
        warmup,
        out=tmp_path / "sparse",
        stage="sparse",
        steps=2,
        load=checkpoint.folder_of(warmup.out, WARMUP),
        learning_rate=1e-9,
    )
    run_ranks(1, _train, sparse)
    weights = {}
    for run, step in ((first, FIRST), (warmup, WARMUP), (sparse, 2)):
        run_ranks(1, _export, checkpoint.folder_of(run.out, step), tmp_path / "hf", data)
        weights[run.out.name] = _tensors(tmp_path / "hf")
    for name, before in weights["first"].items():
        after = weights["warmup"][name]
        if ".indexer." in name:
            assert not torch.equal(before, after), f"{name} did not move"
        else:
            assert torch.equal(before, after), f"{name} moved"
        if name.endswith("e_score_correction_bias"):
            continue  # follows the balance of the experts as soon as routing is trained again
        # A learning rate of 1e-9 leaves what was loaded, to a few roundings.
        torch.testing.assert_close(weights["sparse"][name], after, rtol=1e-6, atol=1e-7)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"parallel": Parallel(tp=2)}, 1, "need a multiple of 2 ranks, and 1 is there"),
    ({"parallel": Parallel(ep=3)}, 3, "8 experts do not divide by ep 3"),
    ({"parallel": Parallel(tp=8)}, 8, "4 attention heads do not divide by tp 8"),
    ({"parallel": Parallel(pp=7)}, 7, "5 layers cannot be spread over pp 7"),
    ({"parallel": Parallel(pp=2, vpp=3)}, 2, "5 layers cannot be spread over pp 2 x vpp 3 = 6 chunks"),
    ({"parallel": Parallel(vpp=2)}, 1, "vpp 2 without pp"),
    ({"parallel": Parallel(pp=2, vpp=0)}, 2, "every degree must be at least 1"),
    (
        {"parallel": Parallel(pp=2, vpp=2), "global_batch": 3},
        2,
        "--vpp 2: a step's 3 microbatches a rank are not a multiple of --pp 2",
    ),
    ({"parallel": Parallel(cp=2), "sequence_length": 66}, 2, "not a multiple of 2 x cp x tp = 4"),
    ({"global_batch": 3}, 2, "not a multiple of 2 data-parallel ranks"),
    ({"micro_batch": 2}, 1, "--micro-batch 2 with --layout thd"),
    ({"steps": 0}, 1, "--steps 0"),
    ({"size": "huge"}, 1, "--size huge"),
    ({"dtype": "fp16"}, 1, "--dtype fp16: its loss scaling"),
    ({"stage": "warmup", "recompute": True}, 1, "--recompute with --stage warmup"),
    ({"stage": "warmup", "indexer_loss": 0.0}, 1, "--indexer-loss 0"),
    ({"stage": "warmup", "mtp": 1}, 1, "--mtp 1 with --stage warmup"),
    ({"distributed_optimizer": True, "optimizer": "sgd"}, 1, "shards Adam only"),
    ({"load": Path("/nowhere")}, 1, "/nowhere does not exist"),
    ({"kernels": "fast"}, 1, "--dsa-kernel-backend fast"),
    ({"layers": "apex"}, 1, "--layers apex"),
    ({"experts": 12, "size": "full"}, 1, "--experts 12: a token chooses 8 of them, from 4 of 8 groups"),
    ({"experts": 8, "size": "full"}, 1, "--experts 8: a token chooses 8 of them, from 4 of 8 groups"),
]


@pytest.mark.parametrize(("changes", "ranks", "message"), REFUSED, ids=[entry[2] for entry in REFUSED])
def test_what_cannot_run_is_refused_before_any_work(
    changes: dict[str, Any], ranks: int, message: str, tmp_path: Path
) -> None:
    settings = TrainSettings(data=tmp_path, out=tmp_path / "out", **changes)
    with pytest.raises(TrainingError) as refused:
        settings.check(world_size=ranks)
    assert message in str(refused.value)
    assert not settings.out.exists()


AUTO: list[tuple[dict[str, Any], bool, bool, tuple[str, str]]] = [
    ({}, False, True, ("local", "none")),
    ({}, True, True, ("te", "none")),
    ({}, True, False, ("local", "none")),
    ({"size": "full", "dtype": "bf16"}, True, True, ("te", "dsv32.dsa")),
    ({"size": "full", "dtype": "bf16"}, False, True, ("local", "none")),
    ({"layers": "local", "kernels": "tilelang"}, True, True, ("local", "tilelang")),
]


@pytest.mark.parametrize(("changes", "gpu", "te", "choice"), AUTO)
def test_layers_and_kernels_are_chosen_by_what_is_there(
    changes: dict[str, Any],
    gpu: bool,
    te: bool,
    choice: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dsv32.training.settings.find_spec", lambda name: name if te else None)
    settings = TrainSettings(data=tmp_path, out=tmp_path, **changes).resolved(gpu=gpu)
    assert (settings.layers, settings.kernels) == choice


WRONG_DEVICE: list[tuple[dict[str, Any], bool, str]] = [
    ({"layers": "te"}, False, "--layers te: Transformer Engine's layers need a GPU"),
    ({"kernels": "tilelang"}, False, "--dsa-kernel-backend tilelang: it needs a GPU"),
    ({"layers": "local", "kernels": "dsv32.dsa"}, True, "--dtype fp32: GPU kernels are for bf16"),
]


@pytest.mark.parametrize(
    ("changes", "gpu", "message"), WRONG_DEVICE, ids=[entry[2] for entry in WRONG_DEVICE]
)
def test_what_this_machine_cannot_run_is_refused(
    changes: dict[str, Any], gpu: bool, message: str, tmp_path: Path
) -> None:
    settings = TrainSettings(data=tmp_path, out=tmp_path, **changes).resolved(gpu=gpu)
    with pytest.raises(TrainingError, match=re.escape(message)):
        settings.check_device(gpu=gpu)


def test_fewer_experts_change_nothing_else(tmp_path: Path) -> None:
    size = TrainSettings(data=tmp_path, out=tmp_path, size="full", experts=16).model_size
    assert size == replace(FULL, experts=16)


def _script(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_script_trains_on_two_ranks_and_under_torchrun_and_says_a_nan_in_one_clear_error(
    data: Path, tmp_path: Path
) -> None:
    small = ("--data", data, "--sequence-length", 64, "--global-batch", 2)
    done = _script("train", *small, "--out", tmp_path / "a", "--steps", 1, "--ranks", 2, "--cp", 2)
    assert done.returncode == 0, done.stderr
    assert "step      1  lm loss" in done.stdout
    assert "UserWarning" not in done.stderr
    assert checkpoint.latest(tmp_path / "a") == checkpoint.folder_of(tmp_path / "a", 1)

    # The same run goes on under torchrun, by its plain name where the image's is ours. torch's own waits for
    # ever for the address of its host, which a container without a network does not have.
    ours = SHARE.exists() and not has_libuv()
    launcher = ["torchrun"] if ours else [sys.executable, "-m", "dsv32.torchrun"]
    words = ["train", *small, "--out", tmp_path / "a", "--steps", 2, "--cp", 2]
    command = [*launcher, "--nproc-per-node", 2, SCRIPT, *words]
    more = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=300)
    assert more.returncode == 0, more.stderr
    assert "step      2  lm loss" in more.stdout
    assert checkpoint.latest(tmp_path / "a") == checkpoint.folder_of(tmp_path / "a", 2)

    failed = _script(
        "train", *small, "--out", tmp_path / "b", "--steps", 9, "--learning-rate", 1e30, "--warmup-steps", 0
    )
    assert failed.returncode == 2, failed.stderr
    assert "not finite" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert checkpoint.latest(tmp_path / "b") is None


def test_script_help_teaches_and_a_missing_corpus_is_one_clear_error(tmp_path: Path) -> None:
    taught = _script("--help")
    assert taught.returncode == 0
    assert "prepare --out" in taught.stdout
    missing = _script("train", "--data", tmp_path / "absent", "--out", tmp_path / "out")
    assert missing.returncode == 2
    assert "run `prepare` first" in missing.stderr
    assert "Traceback" not in missing.stderr
