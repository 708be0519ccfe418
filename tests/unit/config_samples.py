"""The smallest table that load_config accepts."""

MINIMAL = """
[tool.dsv32-image]
epoch = 100
suites = ["trixie"]
python = "3.13"
wheel-platform = "x86_64-manylinux_2_40"
[tool.dsv32-image.variants.cpu]
summary = "small"
[[tool.dsv32-image.variants.cpu.layers]]
name = "base"
debs = ["python3"]
[[tool.dsv32-image.variants.cpu.layers]]
name = "python"
wheels = ["einops"]
"""
