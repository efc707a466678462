"""Tensor parallelism of heads, feed-forward widths and sequence lengths that the ranks do not divide."""
