"""Update rules for mindspeed-core, which shard as Adam does and whose checkpoints any layout and Adam read.

``features`` declares the flags, ``rules`` are the optimizers.
"""

__version__ = "0.1.0"
