"""Kernels of this package for devices, in Triton: one module per operator, each function launches one pass."""
