"""Five features that change a training, written from the manual of mindspeed-core."""
