"""Tools for people who develop plugins: NPU branches run without a device, faults on demand."""

__version__ = "0.1.0"
