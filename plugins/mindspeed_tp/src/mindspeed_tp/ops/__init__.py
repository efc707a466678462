"""Operators of MindSpeed that belong to tensor parallelism, under their names and arguments."""
