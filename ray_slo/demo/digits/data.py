"""scikit-learn's handwritten digits (1797 images, 8 x 8, ink 0..16), split once and for all.

The file follows the order of collection, so the halves share few writers, if any: the second half
measures how a network reads other hands, which is harder than a shuffled split.
"""

from __future__ import annotations

import io
from functools import cache

import numpy as np
from numpy.typing import NDArray

SIDE = 8
INK = 16.0  # full ink
TRAIN = 898  # images before the split

Images = NDArray[np.float32]
Labels = NDArray[np.int64]


@cache
def _digits() -> tuple[Images, Labels]:
    from sklearn.datasets import load_digits  # heavy

    data = load_digits()
    images, labels = data.images.astype(np.float32), data.target.astype(np.int64)
    images.flags.writeable = labels.flags.writeable = False
    return images, labels


def train_set() -> tuple[Images, Labels]:
    """Images (898, 8, 8) in 0..16 and labels (898,), read-only."""
    images, labels = _digits()
    return images[:TRAIN], labels[:TRAIN]


def test_set() -> tuple[Images, Labels]:
    """Held-out images (899, 8, 8) in 0..16 and labels (899,), read-only."""
    images, labels = _digits()
    return images[TRAIN:], labels[TRAIN:]


def to_png(image: Images, side: int = 64, dark_on_light: bool = True) -> bytes:
    """One 8 x 8 image as a grayscale PNG of ``side`` x ``side`` pixels, as a client would send."""
    from PIL import Image

    gray = np.rint(image / INK * 255).astype(np.uint8)
    if dark_on_light:
        gray = 255 - gray
    buffer = io.BytesIO()
    picture = Image.fromarray(gray).resize((side, side), Image.Resampling.NEAREST)
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def test_pngs(count: int | None = None, side: int = 64) -> tuple[list[bytes], Labels]:
    """The first ``count`` (default: all) held-out images as PNG bytes, and their labels."""
    images, labels = test_set()
    return [to_png(image, side) for image in images[:count]], labels[:count]
