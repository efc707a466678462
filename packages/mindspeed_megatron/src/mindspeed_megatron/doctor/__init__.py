"""``mindspeed-features doctor``: look a machine over before a training fails on it."""
