"""Training of DeepSeek-V3.2 on Megatron-Core: sizes, model, data, steps, checkpoints, reports."""

import warnings

from dsv32 import cpu

# Before any module here imports Megatron, also in a rank that begins by unpickling one of its functions.
cpu.prepare()

# What Megatron says on each rank of what it does without, and of parts that no run here uses: a screen of it
# before the first step. Which layers and kernels a run has is decided and said by its settings.
for _message in (
    "(Transformer Engine and )?Apex (is|are) not installed",
    "MimoModelConfig is experimental",
    "full scope is deprecated",
):
    warnings.filterwarnings("ignore", message=_message, category=UserWarning)
