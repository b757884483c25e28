"""Ranks items for a user: Wide & Deep and NCF, trained here on a made-up world of interactions."""

from .app import Answer, Query, Recommender, payloads

__all__ = ["Answer", "Query", "Recommender", "payloads"]
