"""Mixture of experts for mindspeed-core: communication of experts beside computation, on every platform."""

__version__ = "0.1.0"
