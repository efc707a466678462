"""Plan a launch of any size without devices.

`mindspeed_tune.command` is the program. A rank of the launch is run on fake tensors in a process of its own,
which fills a `RankRecord`; everything else (order check, traffic, schedule, memory estimate, reports) reads
such records and needs neither torch nor megatron-core.
"""

__version__ = "0.1.0"
