"""Kernels for devices, in Triton: one module per operator, each function of it launches one pass."""
