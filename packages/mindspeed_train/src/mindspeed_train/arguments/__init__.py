"""Validate the arguments and derive what follows from them."""
