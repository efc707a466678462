"""The file by which Megatron-LM, and everybody who reads its checkpoints, finds the latest one."""

TRACKER = "latest_checkpointed_iteration.txt"
"""Its name in the folder of ``--save``; it holds the step as text."""
