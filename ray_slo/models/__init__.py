"""What touches the user's models: measuring their latency profiles, loading variants."""
