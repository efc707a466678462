"""Data: which samples a run reads, from which files, in which order."""
