"""Code of worker replicas: loads variants and runs batches."""
