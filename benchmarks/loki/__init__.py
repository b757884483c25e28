"""Programs of the Loki paper's figures."""
