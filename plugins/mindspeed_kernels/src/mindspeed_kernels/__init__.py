"""Fused operators for mindspeed-core.

``ops`` holds the operators as functions, ``modules`` the megatron-core modules that call them, ``features``
the flags that put those modules into a model.
"""

__version__ = "0.1.0"
