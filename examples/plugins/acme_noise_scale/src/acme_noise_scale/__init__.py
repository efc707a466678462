"""The simple noise scale of the gradient, for mindspeed-core."""
