"""ImageNet: torchvision's classifiers as variants of one model."""

from .app import ImageNet, variants

__all__ = ["ImageNet", "variants"]
