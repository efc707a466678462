"""Model families, weights, data and finetuning for mindspeed-core.

``recipes`` describes families, ``weights`` reads and writes their files, ``data`` prepares text and
instructions, ``lora`` places adapters; ``features`` declares the flags.
"""

__version__ = "0.1.0"
