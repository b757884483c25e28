"""In worker replicas: loads the variants and runs the batches."""
