"""Connections of frontends and workers to schedulers."""
