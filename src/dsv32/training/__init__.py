"""Training of DeepSeek-V3.2 on Megatron-Core: sizes, model, data, steps, checkpoints, reports."""
