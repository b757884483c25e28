"""The application: a plain class. Its batch method gets one of the loaded variants."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from ray_slo.models import vision
from ray_slo.models.running import Staged
from ray_slo.models.vision import ImageAnswer, ImageClassifier

if TYPE_CHECKING:
    from ray_slo import Variant

MAX_BYTES = 16 * 2**20
MAX_PIXELS = 50 * 10**6  # checked before decoding
SIDE = 640  # no network of the family looks at more than 600 x 600 pixels
MIN_SIDE = 8
FORMATS = ("JPEG", "PNG", "WEBP")


class ImageNet:
    """Names the five likeliest of ImageNet's 1000 categories for a picture."""

    def __call__(
        self, classifier: ImageClassifier, pictures: list[NDArray[np.uint8]] | Staged
    ) -> list[ImageAnswer]:
        """Answer preprocessed pictures, in the same order."""
        return classifier(pictures)

    def stage(self, classifier: ImageClassifier, pictures: list[NDArray[np.uint8]]) -> Staged:
        """Prepare the next batch while another one runs on a GPU."""
        return classifier.stage(pictures)

    @staticmethod
    def preprocess(item: Any) -> NDArray[np.uint8]:
        """The bytes of a JPEG, PNG or WebP, a PIL image or an array of uint8, as an RGB square.

        The square is the middle of the picture. No variant looks beyond it, because variants resize
        the shorter side and crop the centre. Squares larger than `SIDE` are shrunk to it. Smaller
        ones are not changed, because each variant resizes in its own way.

        ValueError says what was wrong with ``image``.
        """
        return _square(picture_of(item))

    @staticmethod
    def example_input() -> NDArray[np.uint8]:
        """A preprocessed picture of the data set's usual size (500 x 375), for profiling."""
        return np.random.default_rng(0).integers(0, 256, (375, 375, 3), np.uint8)


def variants(*names: str, weights: str | None = None, device: str = "auto") -> list[Variant]:
    """Variants for `@ray_slo.deployment(variants=…)`, with the published accuracies.

    Args:
        names: of torchvision's classifiers; default: RAMSIS' 26.
        weights, device: see `ray_slo.models.vision.load`.

    ValueError names the valid names; ImportError: torchvision is missing.
    """
    from ray_slo import Variant

    return [
        Variant(
            name,
            accuracy=vision.accuracy(name),
            load="ray_slo.models.vision:load",
            kwargs={"name": name, "weights": weights, "device": device},
        )
        for name in names or vision.FAMILY
    ]


def picture_of(item: Any, side: int = SIDE) -> Image.Image:
    """The bytes of a JPEG, PNG or WebP, a PIL image or an array of uint8, in RGB and upright.

    ``side``: a JPEG may be decoded at a smaller size, but no side gets shorter than this.

    ValueError says what was wrong with ``image``.
    """
    if isinstance(item, bytes | bytearray | memoryview):
        return _decode(bytes(item), side)
    if isinstance(item, Image.Image):
        return _rgb(item)
    if isinstance(item, np.ndarray):
        return _from_array(item)
    raise _refuse(
        f"a {type(item).__name__}",
        "the bytes of a JPEG, PNG or WebP, a PIL image or an array of uint8",
    )


def _refuse(got: str, wanted: str) -> ValueError:
    return ValueError(f"image: got {got}, wanted {wanted}")


def _decode(raw: bytes, side: int) -> Image.Image:
    """Decode to RGB. Sizes are checked before decoding."""
    wanted = (
        f"a JPEG, PNG or WebP of at most {MAX_BYTES // 2**20} MiB and {MAX_PIXELS // 10**6} "
        "megapixels"
    )
    if len(raw) > MAX_BYTES:
        raise _refuse(f"{len(raw)} bytes", wanted)
    try:
        with Image.open(io.BytesIO(raw), formats=FORMATS) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise _refuse(f"{picture.width} x {picture.height} pixels", wanted)
            picture.draft("RGB", (side, side))  # a JPEG decodes at a half, a quarter, … for less
            return _rgb(ImageOps.exif_transpose(picture))  # photographs contain their orientation
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _refuse("a decompression bomb", wanted) from None
    except ValueError as error:
        if str(error).startswith("image: "):
            raise
        raise _refuse("an unreadable file", wanted) from None
    except (OSError, SyntaxError, EOFError):
        raise _refuse("an unreadable file", wanted) from None


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I"):  # 16-bit gray: Pillow would clip it
        picture = Image.fromarray((np.asarray(picture) // 257).astype(np.uint8))
    if "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")


def _from_array(array: NDArray[Any]) -> Image.Image:
    wanted = "uint8 of shape (height, width, 3) or (height, width)"
    if array.dtype != np.uint8:
        raise _refuse(f"an array of {array.dtype}", wanted)
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)) or not array.size:
        raise _refuse(f"an array of shape {array.shape}", wanted)
    return Image.fromarray(array).convert("RGB")


def _square(picture: Image.Image) -> NDArray[np.uint8]:
    width, height = picture.size
    side = min(width, height)
    if side < MIN_SIDE:
        raise _refuse(f"{width} x {height} pixels", f"at least {MIN_SIDE} x {MIN_SIDE}")
    left, top = (width - side) // 2, (height - side) // 2
    square = picture.crop((left, top, left + side, top + side))
    if side > SIDE:
        square = square.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return np.asarray(square)
