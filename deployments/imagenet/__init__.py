"""ImageNet: torchvision's classifiers as variants of one model."""

from .app import ImageNet, variants
from .pictures import payloads

__all__ = ["ImageNet", "payloads", "variants"]
