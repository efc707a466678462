"""Model families: one file each, without torch."""
