"""Handwritten digits: five networks of rising cost and accuracy, trained locally on first use."""

from ray_slo.demo.digits.app import Digits, DigitsFamily, load_variant, payloads, variants

__all__ = ["Digits", "DigitsFamily", "load_variant", "payloads", "variants"]
