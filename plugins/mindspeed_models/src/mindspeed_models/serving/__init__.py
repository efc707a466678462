"""Trained models that answer people: the terminal's chat and the HTTP server."""
