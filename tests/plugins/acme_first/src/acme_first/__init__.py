"""Three features of a stranger, written for hook interface 1.0."""
