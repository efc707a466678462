"""Weights between Hugging Face's names and megatron-core's: one table, several readers."""
