"""The command line: the flags of core, host and features together, parsed without torch."""
