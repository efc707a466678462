"""Text: tokenizers, and the program that turns text into a dataset."""
