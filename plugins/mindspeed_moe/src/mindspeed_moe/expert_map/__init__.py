"""Which rank computes which expert: plans, maps, migration of experts between steps, copies of hot ones."""
