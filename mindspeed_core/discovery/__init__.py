"""Find what is installed: read entry points, check declarations, load extensions.

Nothing here imports torch or megatron, and a broken distribution never hurts another.
"""
