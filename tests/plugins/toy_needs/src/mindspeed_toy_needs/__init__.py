"""One small feature per thing that feature families ask of the core."""
