"""Profiling for mindspeed-core: traces of chosen steps on chosen ranks.

``features`` declares the flags, ``options`` is what they mean, ``recorder`` follows the steps, ``backends``
makes the profiler of the device.
"""

__version__ = "0.1.0"
