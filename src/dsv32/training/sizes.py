"""Model sizes: the 5-layer DeepSeek-V3.2 at full width, and a tiny one of the same shape for CPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Size:
    """What defines a DeepSeek-V3.2 model; the names are those of the paper, sizes in channels or counts.

    Sources: DeepSeek-V3.2-Exp's published config.json by way of transformers' ``DeepseekV32Config`` defaults.
    """

    name: str
    layers: int
    dense_layers: int  # the first layers have a dense MLP, the others a mixture of experts
    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int  # channels of a query head without rotary embedding
    rope: int  # channels of a query head with rotary embedding
    value: int
    ffn: int
    moe_ffn: int
    experts: int
    experts_per_token: int
    groups: int
    groups_kept: int
    shared_experts: int
    routed_scaling: float
    index_heads: int
    index_size: int
    top_k: int
    vocabulary: int
    rope_base: int = 10_000
    yarn_factor: float = 40.0
    yarn_original_length: int = 4096

    def __post_init__(self) -> None:
        if not 0 <= self.dense_layers <= self.layers:
            raise ValueError(f"size {self.name}: {self.dense_layers} dense of {self.layers} layers")
        if self.experts % self.groups:
            raise ValueError(f"size {self.name}: {self.experts} experts in {self.groups} groups")


FULL = Size(
    name="full",
    layers=5,
    dense_layers=3,
    hidden=7168,
    heads=128,
    q_rank=1536,
    kv_rank=512,
    nope=128,
    rope=64,
    value=128,
    ffn=18432,
    moe_ffn=2048,
    experts=256,
    experts_per_token=8,
    groups=8,
    groups_kept=4,
    shared_experts=1,
    routed_scaling=2.5,
    index_heads=64,
    index_size=128,
    top_k=2048,
    vocabulary=129_280,
)

TINY = Size(
    name="tiny",
    layers=5,
    dense_layers=3,
    hidden=64,
    heads=4,
    q_rank=32,
    kv_rank=32,
    nope=16,
    rope=16,
    value=16,
    ffn=128,
    moe_ffn=32,
    experts=8,
    experts_per_token=2,
    groups=4,
    groups_kept=2,
    shared_experts=1,
    routed_scaling=2.5,
    index_heads=16,
    index_size=32,
    top_k=16,
    vocabulary=320,
    # 128 positions of training at factor 4 exercise all of yarn's ranges.
    yarn_factor=4.0,
    yarn_original_length=32,
)

SIZES = {size.name: size for size in (FULL, TINY)}
