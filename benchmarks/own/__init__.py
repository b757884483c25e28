"""Programs beyond the papers."""
