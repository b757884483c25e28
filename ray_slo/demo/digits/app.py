"""The digits application: a plain class with a batch method, for ray-slo, Ray Serve or your own
loop."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ray_slo.core.text import quoted
from ray_slo.demo.digits.data import INK, SIDE, test_set
from ray_slo.demo.digits.family import spec
from ray_slo.models.loading import checked_by

if TYPE_CHECKING:
    from ray_slo import Variant
    from ray_slo.demo.digits.networks import Network

MAX_BYTES = 4 * 2**20
# Largest side in pixels. It is checked before decoding, and limits the square to which a thin
# picture is padded.
MAX_SIDE = 2048
MIN_CONTRAST = 16  # of 255; a picture with less contrast has no readable digit
FILL = 0.8  # digits that fill less of the picture are cropped, as those in the data fill it


class Answer(TypedDict):
    label: int
    confidence: float


@checked_by(lambda name: spec(name))
def load_variant(name: str) -> Network:
    """Return the network of a name. It is trained first if it is not cached. It maps images, shape
    (b, 8, 8), to probabilities, shape (b, 10).

    Raises:
        ValueError: the name is unknown. The message has the valid ones.
    """
    spec(name)  # report a wrong name before the slow import of torch
    from ray_slo.demo.digits.train import load_or_train

    return load_or_train([name])[name].module


class DigitsFamily:
    """Reads handwritten digits with the network that each call gets. It is for a deployment with
    variants.

    Args:
        threads: number of torch's CPU threads.
    """

    def __init__(self, threads: int = 1) -> None:
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise ValueError(f"threads: got {quoted(threads)}, wanted a whole number from 1")
        import torch

        torch.set_num_threads(threads)

    def __call__(self, network: Network, images: list[NDArray[np.float32]]) -> list[Answer]:
        """Return one answer for each preprocessed image, shape (8, 8), in the same order."""
        if not images:
            return []
        import torch

        with torch.inference_mode():
            confidence, label = network(torch.from_numpy(np.stack(images))).max(1)
        return [
            {"label": int(which), "confidence": float(sure)}
            for which, sure in zip(label.tolist(), confidence.tolist(), strict=True)
        ]

    @staticmethod
    def preprocess(item: Any) -> NDArray[np.float32]:
        """Return an image as float32, shape (8, 8), ink 0..16. The item is the bytes of a PNG or
        JPEG, or 8 x 8 such numbers.

        Pictures may have any size up to the limits above, dark on light or light on dark.

        Raises:
            ValueError: the image is not valid. The message says what is wrong.
        """
        if isinstance(item, (bytes, bytearray, memoryview)):
            return _from_file(bytes(item))
        return _from_numbers(item)

    @staticmethod
    def example_input() -> NDArray[np.float32]:
        """Return a preprocessed held-out image, for warm-up and profiling."""
        return test_set()[0][0].copy()


class Digits(DigitsFamily):
    """Reads handwritten digits with one network.

    Args:
        variant: name of the network, digits-xs to digits-xl.
        threads: number of torch's CPU threads.
    """

    def __init__(self, variant: str = "digits-m", threads: int = 1) -> None:
        super().__init__(threads)
        self.variant = variant
        self.network = load_variant(variant)

    def __call__(  # type: ignore[override]
        self, images: list[NDArray[np.float32]]
    ) -> list[Answer]:
        """Return one answer for each preprocessed image, shape (8, 8), in the same order."""
        return super().__call__(self.network, images)


def variants(*names: str) -> list[Variant]:
    """The networks of these names (default: the family, in order of cost), with the accuracies
    measured on held-out writers, for `@ray_slo.deployment(variants=…)`; trains what the cache
    lacks. ValueError names the valid ones.
    """
    from ray_slo import Variant
    from ray_slo.demo.digits.train import accuracies

    return [
        Variant(name, accuracy=100 * share, load="ray_slo.demo.digits:load_variant", args=(name,))
        for name, share in accuracies(names or None).items()
    ]


def _refuse(got: str, wanted: str) -> ValueError:
    return ValueError(f"image: got {got}, wanted {wanted}")


def _from_numbers(item: Any) -> NDArray[np.float32]:
    wanted = (
        f"{SIDE} x {SIDE} numbers from 0 (paper) to {INK:.0f} (ink), or the bytes of a PNG or JPEG"
    )
    if isinstance(item, (list, tuple)):
        # Check the rows before NumPy does: it raises for rows of unequal length, and copies long
        # ones.
        if len(item) != SIDE:
            raise _refuse(f"{len(item)} rows", wanted)
        for index, row in enumerate(item):
            if not isinstance(row, (list, tuple)):
                raise _refuse(f"a {type(row).__name__} as row {index}", wanted)
            if len(row) != SIDE:
                raise _refuse(f"{len(row)} numbers in row {index}", wanted)
            for value in row:
                if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
                    raise _refuse(f"{value!r:.40} in row {index}", wanted)
    elif not isinstance(item, np.ndarray):
        raise _refuse(f"a {type(item).__name__}", wanted)
    array = np.asarray(item)
    if array.shape != (SIDE, SIDE):
        raise _refuse(f"an array of shape {array.shape}", wanted)
    if array.dtype.kind not in "iuf":
        raise _refuse(f"an array of {array.dtype}", wanted)
    low, high = array.min(), array.max()
    if not (low >= 0 and high <= INK):  # also false for NaN
        raise _refuse(f"numbers from {low} to {high}", wanted)
    return array.astype(np.float32)


def _from_file(raw: bytes) -> NDArray[np.float32]:
    gray = _decode(raw)
    height, width = gray.shape
    edge = np.concatenate([gray[0], gray[-1], gray[:, 0], gray[:, -1]])
    ink = np.abs(gray - np.median(edge))  # difference from the background, dark or light
    if ink.max() < MIN_CONTRAST:
        raise _refuse(
            f"an even {width} x {height} picture", "a digit that stands out from its background"
        )
    # The networks were trained on digits that fill their frame. So wide margins are cropped.
    rows, columns = (np.flatnonzero((ink > 0.25 * ink.max()).any(axis)) for axis in (1, 0))
    box = max(np.ptp(rows), np.ptp(columns)) + 1
    if box < FILL * max(height, width):
        ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    side = max(ink.shape)
    square = np.zeros((side, side), np.float32)
    top, left = ((side - length) // 2 for length in ink.shape)
    square[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    small = Image.fromarray(square).resize((SIDE, SIDE), Image.Resampling.BOX)
    pixels = np.asarray(small, np.float32)
    return np.clip(pixels * (INK / pixels.max()), 0, INK).astype(np.float32)


def _decode(raw: bytes) -> NDArray[np.float32]:
    """Return a picture in grayscale, shape (height, width), 0..255. Its size is checked before it
    is decoded."""
    wanted = f"a PNG or JPEG of at most {MAX_BYTES} bytes and {MAX_SIDE} x {MAX_SIDE} pixels"
    if len(raw) > MAX_BYTES:
        raise _refuse(f"{len(raw)} bytes", wanted)
    try:
        with Image.open(io.BytesIO(raw), formats=("PNG", "JPEG")) as picture:
            if max(picture.size) > MAX_SIDE:
                raise _refuse(f"{picture.width} x {picture.height} pixels", wanted)
            if picture.mode.startswith("I"):  # 16-bit gray: Pillow would clip it
                return np.asarray(picture, np.float32) / np.float32(257)
            if picture.mode in ("LA", "PA", "RGBA") or "transparency" in picture.info:
                return _flatten(picture.convert("RGBA"))
            return np.asarray(picture.convert("L"), np.float32)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _refuse("a decompression bomb", wanted) from None
    except ValueError as error:
        if str(error).startswith("image: "):
            raise
        raise _refuse("an unreadable file", wanted) from None
    except (OSError, SyntaxError, EOFError):
        raise _refuse("an unreadable file", wanted) from None


def _flatten(picture: Image.Image) -> NDArray[np.float32]:
    """Replace transparent pixels by background: white under dark ink, black under light ink."""
    pixels = np.asarray(picture, np.float32)
    gray = pixels[..., :3] @ np.array([0.299, 0.587, 0.114], np.float32)
    alpha = pixels[..., 3] / 255
    shown = float((gray * alpha).sum() / max(float(alpha.sum()), 1.0))
    paper = 255.0 if shown < 128 else 0.0
    return (gray * alpha + paper * (1 - alpha)).astype(np.float32)
