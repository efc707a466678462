"""Policies: measured costs decide what is computed again and what is swapped."""
