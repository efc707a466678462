"""Context parallelism for mindspeed-core: sequences split over ranks, on every platform."""

__version__ = "0.1.0"
