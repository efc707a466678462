"""Low-rank adapters, placed through the layer specification."""
