"""The pipeline: a page goes to `detect`, and every line on it to `recognise`. `join` makes one
answer in reading order."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from PIL import Image

from ray_slo.models.devices import check_session_device
from ray_slo.models.loading import checked_by

if TYPE_CHECKING:
    from ray_slo import Outputs, Pipeline, Variant

    from .networks import Detector, Grey, Recogniser

# Longest sides of a shrunk page, pixels.
SIDES = {"det320": 320, "det480": 480, "det736": 736, "det960": 960}
# height of a line, and whether in 8-bit integers
READERS = {
    "rec32-int8": (32, True),
    "rec32": (32, False),
    "rec40-int8": (40, True),
    "rec40": (40, False),
    "rec48-int8": (48, True),
    "rec48": (48, False),
}
MAX_BYTES = 16 * 2**20
MAX_SIDE = 4096  # pixels, checked before decoding
SLO_MS = 1500.0
FLOOR = 70.0  # percent of characters; paths below this are of no use
MEASURED = Path(__file__).with_name("measured.json")  # by `python -m deployments.ocr.measure`


class Line(TypedDict):
    """A line of text: its corners on the page, clockwise from the top left."""

    text: str
    confidence: float
    box: list[list[float]]


class Answer(TypedDict):
    """The whole text, top to bottom and left to right, and the lines."""

    text: str
    lines: list[Line]


def _check_detector(name: str, threads: int = 1, device: str = "auto") -> None:
    _one_of(name, SIDES)
    check_session_device(device)


def _check_recogniser(name: str, threads: int = 1, device: str = "auto") -> None:
    _one_of(name, READERS)
    check_session_device(device)


@checked_by(_check_detector)
def load_detector(name: str, threads: int = 1, device: str = "auto") -> Detector:
    """A detector by name, on a device ("auto", "cpu", "cuda", "cuda:1", …); ValueError names the
    valid ones."""
    from .networks import Detector

    return Detector(_one_of(name, SIDES), threads, device)


@checked_by(_check_recogniser)
def load_recogniser(name: str, threads: int = 1, device: str = "auto") -> Recogniser:
    """A recogniser by name, on a device; ValueError names the valid ones."""
    from .networks import Recogniser

    height, int8 = _one_of(name, READERS)
    return Recogniser(height, int8, threads, device)


class Detect:
    """Finds the lines of text on a page and cuts them out."""

    def __call__(self, detector: Detector, pages: list[Grey]) -> list[Outputs]:
        """Find the corners of the lines on preprocessed pages, and make an item per line."""
        from ray_slo import Outputs

        return [
            Outputs(
                [box.corners() for box in boxes], {"recognise": [box.crop(page) for box in boxes]}
            )
            for page, boxes in zip(pages, detector(pages), strict=True)
        ]

    @staticmethod
    def preprocess(item: Any) -> Grey:
        """The bytes of a PNG or JPEG, or an array of uint8, (height, width) or (height, width, 3),
        as grey (height, width): text differs from paper by its darkness.

        ValueError says what was wrong with ``page``.
        """
        wanted = (
            f"a PNG or JPEG (at most {MAX_BYTES} bytes) or an array of uint8, "
            f"of at most {MAX_SIDE} x {MAX_SIDE} pixels"
        )
        if isinstance(item, (bytes, bytearray, memoryview)):
            return _decode(bytes(item), wanted)
        if not isinstance(item, np.ndarray):
            raise _refuse(f"a {type(item).__name__}", wanted)
        if item.dtype != np.uint8 or item.shape[2:] not in ((), (3,)) or item.ndim < 2:
            raise _refuse(f"an array of {item.dtype} and shape {item.shape}", wanted)
        if min(item.shape) == 0 or max(item.shape) > MAX_SIDE:
            raise _refuse(f"an array of shape {item.shape}", wanted)
        return item if item.ndim == 2 else np.asarray(Image.fromarray(item).convert("L"))

    @staticmethod
    def example_input() -> Grey:
        """A page with a typical number of lines."""
        from .pages import image, page

        return image(page(seed=0, index=0))


class Recognise:
    """Reads lines."""

    def __call__(self, recogniser: Recogniser, lines: list[Grey]) -> list[tuple[str, float]]:
        """Read pictures of lines. Return (text, confidence) of each, in the same order."""
        return recogniser(lines)

    @staticmethod
    def example_input() -> Grey:
        """A line with the mean ratio of length to height of rendered pages."""
        from .pages import line

        return line("Order october quality 12/9/2028 quantity $17.40")


def join(boxes: list[list[list[float]]], outputs: dict[str, list[Any]]) -> Answer:
    """Join the results of detection and recognition into one answer. Boxes come in reading
    order."""
    lines: list[Line] = [
        {"text": text, "confidence": round(confidence, 4), "box": box}
        for box, (text, confidence) in zip(boxes, outputs["recognise"], strict=True)
        if text
    ]
    text = ""
    for before, line in zip([None, *lines], lines, strict=False):
        if before is not None:
            text += " " if _same_row(before["box"], line["box"]) else "\n"
        text += line["text"]
    return {"text": text, "lines": lines}


def detectors(*names: str, device: str = "auto") -> list[Variant]:
    """Detectors of these names (default: all) with measured accuracy and lines per page."""
    from ray_slo import Variant

    return [
        Variant(
            name,
            accuracy=measured()["accuracies"][name],
            load="deployments.ocr:load_detector",
            args=(name,),
            kwargs={"device": device},
            factors={"recognise": measured()["lines_per_page"][name]},
        )
        for name in names or SIDES
        if _one_of(name, SIDES)
    ]


def recognisers(*names: str, device: str = "auto") -> list[Variant]:
    """Recognisers of these names (default: all) with measured accuracy."""
    from ray_slo import Variant

    return [
        Variant(
            name,
            accuracy=measured()["accuracies"][name],
            load="deployments.ocr:load_recogniser",
            args=(name,),
            kwargs={"device": device},
        )
        for name in names or READERS
        if _one_of(name, READERS)
    ]


def pipeline(latency_slo_ms: float = SLO_MS, device: str = "auto", **options: Any) -> Pipeline:
    """The whole pipeline with all variants, all on one sort of device; further arguments are those
    of `ray_slo.Pipeline`."""
    import ray_slo

    chosen = {
        "num_replicas": 2,
        "max_replicas": 4,
        "ray_actor_options": {"num_cpus": 0.5},
        "planner": {"name": "loki", "kwargs": {"accuracy_floor": FLOOR}},
        "name": "ocr",
    }
    return ray_slo.Pipeline(
        [
            ray_slo.Task(
                "detect",
                Detect,
                variants=detectors(device=device),
                options={"max_batch_size": 4},
            ),
            ray_slo.Task(
                "recognise",
                Recognise,
                parent="detect",
                variants=recognisers(device=device),
                options={"max_batch_size": 16},
            ),
        ],
        latency_slo_ms=latency_slo_ms,
        join=join,
        path_accuracies=measured()["path_accuracies"],
        **{**chosen, **options},
    )


@cache
def measured() -> dict[str, Any]:
    """The figures that `python -m deployments.ocr.measure --write` wrote."""
    found: dict[str, Any] = json.loads(MEASURED.read_text())
    return found


def _one_of(name: str, valid: dict[str, Any]) -> Any:
    if name not in valid:
        raise ValueError(f"variant: got {name!r}, wanted one of {', '.join(valid)}")
    return valid[name]


def _same_row(one: list[list[float]], other: list[list[float]]) -> bool:
    """Whether the other begins right of the end of the one, and less than half a line lower."""
    (_, right), (other_left, _) = (
        (min(x for x, _ in box), max(x for x, _ in box)) for box in (one, other)
    )
    height = min(box[3][1] - box[0][1] for box in (one, other))
    return other_left >= right - height and abs(other[0][1] - one[1][1]) < height / 2


def _refuse(got: str, wanted: str) -> ValueError:
    return ValueError(f"page: got {got}, wanted {wanted}")


def _decode(raw: bytes, wanted: str) -> Grey:
    if len(raw) > MAX_BYTES:
        raise _refuse(f"{len(raw)} bytes", wanted)
    try:
        with Image.open(io.BytesIO(raw), formats=("PNG", "JPEG")) as picture:
            if max(picture.size) > MAX_SIDE:  # before anything is decoded
                raise _refuse(f"{picture.width} x {picture.height} pixels", wanted)
            if "A" in picture.mode or "transparency" in picture.info:  # nothing is white paper
                picture = picture.convert("RGBA")
                paper = Image.new("RGBA", picture.size, "white")
                return np.asarray(Image.alpha_composite(paper, picture).convert("L"))
            return np.asarray(picture.convert("L"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _refuse("a decompression bomb", wanted) from None
    except ValueError as error:
        if str(error).startswith("page: "):
            raise
        raise _refuse("an unreadable file", wanted) from None
    except (OSError, SyntaxError, EOFError):
        raise _refuse("an unreadable file", wanted) from None
