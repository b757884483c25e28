"""Pictures to try applications with. Nothing is downloaded."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

_PHOTOGRAPHS = ("motorcycle_left.png", "astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")
DRAWN = 8
WIDTH, HEIGHT = 500, 375  # the data set's usual size


def payloads() -> list[bytes]:
    """Payloads for `ray-slo bench --payload deployments.imagenet:payloads`: photographs of
    scikit-image, or drawn pictures if it is missing."""
    try:
        return photographs()
    except ImportError:
        return drawings()


def photographs() -> list[bytes]:
    """PNGs and a JPEG of scikit-image's wheel: a motorcycle, a person, and three with neither.
    There are no street scenes, so use your own.

    ImportError: scikit-image is missing.
    """
    package = find_spec("skimage")
    if package is None or package.origin is None:
        raise ImportError("the photographs are scikit-image's: pip install 'ray-slo[traffic]'")
    folder = Path(package.origin).parent / "data"
    return [(folder / name).read_bytes() for name in _PHOTOGRAPHS]


def drawings(count: int = DRAWN, seed: int = 0) -> list[bytes]:
    """JPEGs of coloured shapes with grain. They cost as much as photographs, but have no
    meaning."""
    rng = np.random.default_rng(seed)
    return [_drawing(rng) for _ in range(count)]


def _drawing(rng: np.random.Generator) -> bytes:
    picture = Image.new("RGB", (WIDTH, HEIGHT), tuple(rng.integers(0, 256, 3).tolist()))
    pen = ImageDraw.Draw(picture)
    for _ in range(12):
        (left, right), (top, bottom) = (sorted(rng.integers(0, n, 2)) for n in (WIDTH, HEIGHT))
        shape = pen.ellipse if rng.random() < 0.5 else pen.rectangle
        shape((left, top, right, bottom), fill=tuple(rng.integers(0, 256, 3).tolist()))
    grain = rng.normal(0, 12, (HEIGHT, WIDTH, 3))
    pixels = np.clip(np.asarray(picture) + grain, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()
