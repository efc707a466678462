"""A platform of mindspeed-core: a skeleton for a device of your own."""
