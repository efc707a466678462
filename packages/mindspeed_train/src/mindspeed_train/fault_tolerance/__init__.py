"""Fault tolerance: signals, bad steps, hanging ranks, lost workers."""
