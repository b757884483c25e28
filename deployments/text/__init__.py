"""Does one text follow from another? BERT from tiny to base as variants of one model."""

from .app import Entailment, variants

__all__ = ["Entailment", "variants"]
