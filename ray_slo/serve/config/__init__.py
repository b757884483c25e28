"""Check the config that users write."""
