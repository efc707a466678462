"""Transformer layers that are computed slice by slice of the sequence, each while rows of others travel."""
