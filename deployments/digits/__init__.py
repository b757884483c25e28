"""Handwritten digits: five networks of rising cost and accuracy, trained locally on first use."""

from .app import Digits, load_variant

__all__ = ["Digits", "load_variant"]
