"""Pieces that Megatron-Core calls or is built from: local layers, layouts, hooks of the patch series."""
