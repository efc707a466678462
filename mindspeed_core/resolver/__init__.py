"""Requested flags to a plan: which features are active, in which order and why, or every reason against it.

A pure function over declarations and arguments: it imports no implementation, reads no file and gives the
same plan on every rank and every machine. What depends on the registry alone is computed once per registry,
so that a search may call `resolve` thousands of times a second.
"""
