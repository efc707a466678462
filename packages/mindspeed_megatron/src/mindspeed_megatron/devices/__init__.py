"""Platforms of accelerators, and what the code asks torch_npu for."""
