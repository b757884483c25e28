"""Programs for what is not in the papers."""
