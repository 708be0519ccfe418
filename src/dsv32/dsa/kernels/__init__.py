"""Triton kernels. Import a module of this package only where CUDA and Triton are present."""
