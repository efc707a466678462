"""Ends of a model and their loss: norm of the embedding, normalized head, z-loss; biases of attention."""
