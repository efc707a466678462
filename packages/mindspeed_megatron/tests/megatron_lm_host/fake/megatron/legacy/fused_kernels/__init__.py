"""Kernels that need a CUDA toolkit."""


def load(args):
    raise RuntimeError("there is no CUDA toolkit")
