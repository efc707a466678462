"""Starting the worker processes of a run on this machine, and starting them again when one is lost.

Torch-free: the parent only watches. Workers may be forks of a warm parent or interpreters of their own.
"""
