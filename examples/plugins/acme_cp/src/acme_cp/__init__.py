"""A planner and a mask rule for the context parallelism of mindspeed-cp."""
