"""Experts of ranks: plans, maps, migration of experts between steps, copies of hot ones."""
