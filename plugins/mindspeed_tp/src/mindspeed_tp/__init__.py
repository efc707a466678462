"""Tensor parallelism for mindspeed-core."""

__version__ = "0.1.0"
