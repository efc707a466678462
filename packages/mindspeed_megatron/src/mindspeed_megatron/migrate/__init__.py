"""Reading of launch scripts, and what becomes of each flag in them; nothing in a script is ever run."""
