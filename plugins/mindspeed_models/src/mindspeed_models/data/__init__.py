"""Text and instructions into the files that training reads."""
