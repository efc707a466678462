"""Data: the samples of a run, their files and their order."""
