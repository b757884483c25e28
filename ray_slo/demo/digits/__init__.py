"""Handwritten digits: five networks of rising cost and accuracy. They are trained on this machine
when they are first used."""

from ray_slo.demo.digits.app import Digits, DigitsFamily, load_variant, variants
from ray_slo.demo.digits.data import test_pngs as payloads

__all__ = ["Digits", "DigitsFamily", "load_variant", "payloads", "variants"]
