"""Memory for mindspeed-core: activations computed again, swapped or compressed, and less optimizer state."""

__version__ = "0.1.0"
