"""The update rules, each a `mindspeed_core.DescribedOptimizer`."""
