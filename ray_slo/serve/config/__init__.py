"""What users write, checked."""
