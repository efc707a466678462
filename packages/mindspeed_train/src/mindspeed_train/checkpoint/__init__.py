"""Checkpoints: written beside the training, published whole, read under any layout."""
