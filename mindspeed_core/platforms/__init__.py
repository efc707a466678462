"""The devices a session can run on: cpu, cuda and npu; others through the group ``mindspeed.platforms``."""
