"""Common parts of all forms of attention: visible keys, biases, layouts, blockwise computation."""
