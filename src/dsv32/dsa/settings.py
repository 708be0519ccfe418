"""Settings of the DSA backend, and how it declines."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

LOGGER = logging.getLogger("dsv32.dsa")


class DsaDeclined(RuntimeError):
    """Strict mode: the fused path does not cover this call.

    The message names the operation and the reason.
    """


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user may choose. Read from the environment at each call, so tests need no module state.

    byte_budget: scratch bytes one block may use (scores, probabilities, gathered keys). Every [sq, sk] shaped
        intermediate lives in blocks of this size. `DSV32_DSA_BYTE_BUDGET`, default 512 MiB.
    strict: raise `DsaDeclined` where the fused path would be left. `DSV32_DSA_STRICT`, default off.
    deterministic: bitwise equal results from run to run. `DSV32_DSA_DETERMINISTIC`; unset follows
        `torch.use_deterministic_algorithms`.
    path: `auto` uses the GPU kernels where they run; `torch` forces PyTorch.
        `DSV32_DSA_PATH`.
    indexer: `bf16`, or `fp8` for index scores of queries and keys rounded to e4m3 with a scale for every 128
        channels, as DeepSeek-V3.2 serves its indexer. It changes which keys are chosen and the KL loss's
        value; gradients go straight through the rounding, to the values given. `DSV32_DSA_INDEXER`, default
        bf16.
    """

    byte_budget: int = 512 << 20
    strict: bool = False
    deterministic: bool = False
    path: str = "auto"
    indexer: str = "bf16"

    def __post_init__(self) -> None:
        if self.byte_budget < 1 << 16:
            raise ValueError(f"byte_budget must be at least 65536 bytes, got {self.byte_budget}")
        if self.path not in ("auto", "torch"):
            raise ValueError(f"path must be auto or torch, got {self.path!r}")
        if self.indexer not in ("bf16", "fp8"):
            raise ValueError(f"indexer must be bf16 or fp8, got {self.indexer!r}")

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Settings from `env` (default: this process's environment).

        Raises ValueError on a malformed value.
        """
        env = os.environ if env is None else env
        det = env.get("DSV32_DSA_DETERMINISTIC")
        return cls(
            byte_budget=int(env.get("DSV32_DSA_BYTE_BUDGET", str(512 << 20))),
            strict=_flag(env.get("DSV32_DSA_STRICT", "0")),
            deterministic=torch.are_deterministic_algorithms_enabled() if det is None else _flag(det),
            path=env.get("DSV32_DSA_PATH", "auto"),
            indexer=env.get("DSV32_DSA_INDEXER", "bf16"),
        )


def _flag(text: str) -> bool:
    if text in ("1", "true", "on"):
        return True
    if text in ("0", "false", "off", ""):
        return False
    raise ValueError(f"expected 0 or 1, got {text!r}")


_SAID: set[tuple[str, str]] = set()


def decline(settings: Settings, operation: str, reason: str) -> None:
    """Record that `operation` leaves the fused path because of `reason`.

    Raises DsaDeclined in strict mode. Otherwise warns once per (operation, reason): a silent fallback costs a
    user days, a warning per layer and step drowns the log.
    """
    if settings.strict:
        raise DsaDeclined(f"DSA {operation}: {reason}. Unset DSV32_DSA_STRICT to run the slower path.")
    if (operation, reason) not in _SAID:
        _SAID.add((operation, reason))
        LOGGER.warning("DSA %s leaves the fused path: %s", operation, reason)
