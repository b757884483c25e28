"""Does one text follow from another? BERT from tiny to base as variants of one model."""

from .app import Entailment, variants
from .pairs import payloads

__all__ = ["Entailment", "payloads", "variants"]
