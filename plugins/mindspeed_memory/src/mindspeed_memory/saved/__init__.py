"""Tensors that autograd saves for backward, kept elsewhere or in another form until backward needs them."""
