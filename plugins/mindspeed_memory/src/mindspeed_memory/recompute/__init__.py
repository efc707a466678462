"""Activations that are dropped after forward and computed again in backward."""
