"""Decision and plan logs: rows, encoding, writing."""
