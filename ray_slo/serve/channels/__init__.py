"""Connections between frontends, workers and schedulers, and whether the other end is there."""
