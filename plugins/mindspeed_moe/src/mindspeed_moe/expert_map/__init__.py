"""Where experts are computed."""
