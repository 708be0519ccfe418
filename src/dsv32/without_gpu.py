"""Imported for its effect, before Megatron: `dsv32.cpu.prepare()`, where a list names modules to load."""

from dsv32 import cpu

cpu.prepare()
