"""What a run survives: signals, bad steps, hanging ranks, lost workers."""
