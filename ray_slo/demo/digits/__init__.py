"""Handwritten digits: five networks of rising cost and accuracy. They are trained on this machine
when they are first used."""

from ray_slo.demo.digits.app import Digits, DigitsFamily, load_variant, payloads, variants

__all__ = ["Digits", "DigitsFamily", "load_variant", "payloads", "variants"]
