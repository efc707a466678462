"""What every form of attention shares: which keys a query sees, biases, layouts, blockwise computation."""
