"""Tensor parallelism of dimensions that the ranks do not divide: heads, feed-forward width, sequence length."""
