"""Extensions of another plugin's feature."""
