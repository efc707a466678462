"""A pipeline schedule for mindspeed-pp."""
