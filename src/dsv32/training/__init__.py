"""Training of DeepSeek-V3.2 on Megatron-Core: sizes, model, data, steps, checkpoints, reports."""

from dsv32 import cpu

# Before any module here imports Megatron, also in a rank that begins by unpickling one of its functions.
cpu.prepare()
