"""Host side of the image build: lock, fetch, wheels, rootfs, build, smoke."""

__version__ = "0.1.0"
