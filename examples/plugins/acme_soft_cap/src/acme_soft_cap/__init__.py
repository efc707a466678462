"""Soft-capped attention scores, for mindspeed-core."""
