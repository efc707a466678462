"""Profiling for mindspeed-core: where the time, the bytes and the operations of a training go.

``features`` declares the flags. For ``--profile``, ``options`` is what its flags mean, ``recorder`` follows
the steps, ``backends`` makes the profiler of the device, ``ranges`` names what megatron-core times.
``step_clock``, ``communication_count``, ``flop_meter``, ``memory_history`` and ``module_dump`` measure for
one feature each; ``command`` is the program that reads traces and dumps afterwards.
"""

__version__ = "0.1.0"
