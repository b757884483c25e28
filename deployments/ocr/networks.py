"""The two networks of PP-OCRv4 that rapidocr-onnxruntime's wheel carries, run in real batches.

Detection is a segmentation (DB, Liao et al. 2020): for each pixel, the probability of text.
Connected pixels make a box. The box is grown as in the paper, because the network marks only the
core of a line. Recognition is CTC over columns of four pixels. Both take any size, and their cost
grows with it. So variants differ in the detector's longest side and in the recogniser's height.

The int8 recogniser is quantised here, once per machine (`quantised`), on lines of our own pages.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ray_slo.models.devices import open_session, session_device

if TYPE_CHECKING:
    import onnxruntime

Grey = NDArray[np.uint8]  # (height, width)

STRIDE = 32  # of the detector: sides are multiples of it
THRESHOLD = 0.3  # a pixel above this probability is text
BOX_THRESHOLD = 0.5  # a box is kept if the mean probability of its pixels is above this
GROWTH = 1.6  # the border put around a box, in units of its area over its circumference
MIN_SIDE = 3  # of a box on the network's map, pixels
MAX_LINES = 200  # lines of a page; without it, a hostile picture would be a denial of service
MAX_RATIO = 40.0  # of a line's width to its height; longer ones are squeezed
ALIKE = 1.15  # lines are padded to the width of one that is no more than this times as wide
CALIBRATION = 4  # pages that the quantiser measures activations on
CALIBRATION_SEED = 10_000  # of the pages' series


@dataclass(frozen=True)
class Box:
    """A rectangle on the page: centre, size and angle (degrees, clockwise, -45..45], pixels."""

    x: float
    y: float
    width: float
    height: float
    angle: float

    def corners(self) -> list[list[float]]:
        """[[x, y], …] clockwise from the top left."""
        c, s = math.cos(math.radians(self.angle)), math.sin(math.radians(self.angle))
        w, h = self.width / 2, self.height / 2
        return [
            [round(self.x + dx * c - dy * s, 1), round(self.y + dx * s + dy * c, 1)]
            for dx, dy in ((-w, -h), (w, -h), (w, h), (-w, h))
        ]

    def crop(self, page: Grey) -> Grey:
        """The upright picture in the box."""
        import cv2

        width, height = max(round(self.width), 1), max(round(self.height), 1)
        c, s = math.cos(math.radians(self.angle)), math.sin(math.radians(self.angle))
        dx, dy = (width - 1) / 2, (height - 1) / 2
        to_page = np.array(
            [[c, -s, self.x - dx * c + dy * s], [s, c, self.y - dx * s - dy * c]], np.float64
        )
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        border = cv2.BORDER_REPLICATE
        shown = cv2.warpAffine(page, to_page, (width, height), flags=flags, borderMode=border)
        return np.asarray(shown, np.uint8)


class Detector:
    """Finds lines of text on pages shrunk to ``side``, their longest side in pixels."""

    def __init__(self, side: int, threads: int = 1, device: str = "auto") -> None:
        self.side = side
        self.session = _session(model_path("det"), threads, device)
        self.runs = f"onnxruntime on {session_device(self.session)}"

    def __call__(self, pages: Sequence[Grey]) -> list[list[Box]]:
        """The boxes of each page, in its own pixels, in reading order.

        Pages that are equal in size once shrunk and padded run as one batch.
        """
        import cv2

        batches: dict[tuple[int, int], list[int]] = {}
        scales = [self.side / max(page.shape) for page in pages]
        for i, (page, scale) in enumerate(zip(pages, scales, strict=True)):
            height, width = (STRIDE * math.ceil(round(scale * s) / STRIDE) for s in page.shape)
            batches.setdefault((max(height, STRIDE), max(width, STRIDE)), []).append(i)
        found: list[list[Box]] = [[] for _ in pages]
        for (height, width), members in batches.items():
            grey = np.zeros((len(members), height, width), np.float32)
            for row, i in zip(grey, members, strict=True):
                h, w = pages[i].shape
                size = (
                    min(max(round(scales[i] * w), 1), width),
                    min(max(round(scales[i] * h), 1), height),
                )
                row[: size[1], : size[0]] = _normal(
                    cv2.resize(pages[i], size, interpolation=cv2.INTER_AREA)
                )
            maps = _run(self.session, grey)[:, 0]
            for i, text in zip(members, maps, strict=True):
                found[i] = reading_order(_boxes(text, 1 / scales[i]))
        return found


class Recogniser:
    """Reads lines scaled to ``height`` pixels."""

    def __init__(
        self, height: int, int8: bool = False, threads: int = 1, device: str = "auto"
    ) -> None:
        self.height = height
        self.session = _session(quantised() if int8 else model_path("rec"), threads, device)
        self.runs = f"onnxruntime on {session_device(self.session)}"
        characters = self.session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self.characters = ["", *characters, " "]  # the first class is CTC's blank

    def __call__(self, lines: Sequence[Grey]) -> list[tuple[str, float]]:
        """(text, confidence in 0..1) of each line, in the same order.

        Lines of similar width are padded to the widest of them and run as one batch.
        """
        read: list[tuple[str, float]] = [("", 0.0)] * len(lines)
        scaled = [self.scale(line) for line in lines]
        for members in _alike([line.shape[1] for line in scaled]):
            batch = padded([scaled[i] for i in members])
            for i, row in zip(members, _run(self.session, batch), strict=True):
                read[i] = self._decode(row)
        return read

    def scale(self, line: Grey) -> NDArray[np.float32]:
        """A line at the network's height, in -1..1."""
        import cv2

        ratio = min(line.shape[1] / line.shape[0], MAX_RATIO)
        size = (max(math.ceil(self.height * ratio), 8), self.height)
        return _normal(cv2.resize(line, size, interpolation=cv2.INTER_LINEAR))

    def _decode(self, scores: NDArray[np.float32]) -> tuple[str, float]:
        best, sure = scores.argmax(1), scores.max(1)
        new = np.append(True, best[1:] != best[:-1]) & (best != 0)
        if not new.any():
            return "", 0.0
        return "".join(self.characters[c] for c in best[new]), float(sure[new].mean())


def reading_order(boxes: Sequence[Box]) -> list[Box]:
    """Row by row, each from left to right. A row contains the boxes that overlap its first box by
    half."""
    rows: list[list[Box]] = []
    for box in sorted(boxes, key=lambda box: box.y):
        if rows and abs(box.y - rows[-1][0].y) < min(box.height, rows[-1][0].height) / 2:
            rows[-1].append(box)
        else:
            rows.append([box])
    return [box for row in rows for box in sorted(row, key=lambda box: box.x)]


def padded(lines: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Lines of one height as (lines, height, widest), grey to the right."""
    batch = np.zeros((len(lines), lines[0].shape[0], max(x.shape[1] for x in lines)), np.float32)
    for row, line in zip(batch, lines, strict=True):
        row[:, : line.shape[1]] = line
    return batch


def model_path(kind: str) -> Path:
    """The wheel's network: "det" or "rec". ImportError says what to install."""
    wheel = importlib.util.find_spec("rapidocr_onnxruntime")
    if wheel is None or not wheel.submodule_search_locations:
        raise ImportError(
            "the OCR networks are in rapidocr-onnxruntime: pip install 'ray-slo[ocr]'"
        )
    return Path(wheel.submodule_search_locations[0]) / "models" / f"ch_PP-OCRv4_{kind}_infer.onnx"


def _normal(grey: Any) -> NDArray[np.float32]:
    return np.asarray(grey, np.float32) / 127.5 - 1


def _session(path: Path, threads: int, device: str) -> onnxruntime.InferenceSession:
    import cv2
    import onnxruntime

    cv2.setNumThreads(threads)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # one would be kept for every width of lines
    session: onnxruntime.InferenceSession = open_session(path, options, device)
    return session


def _run(session: onnxruntime.InferenceSession, grey: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(session.run(None, _feed(session, grey))[0], np.float32)


def _feed(session: onnxruntime.InferenceSession, grey: NDArray[np.float32]) -> dict[str, Any]:
    """(b, height, width) in -1..1 as a network takes it: three channels, here equal ones."""
    return {session.get_inputs()[0].name: np.repeat(grey[:, None], 3, axis=1)}


def _boxes(text: NDArray[np.float32], scale: float) -> Iterator[Box]:
    """Boxes on one map of the detector, times ``scale``."""
    import cv2

    mask = cv2.dilate((text > THRESHOLD).astype(np.uint8), np.ones((2, 2), np.uint8))
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    for contour in contours[:MAX_LINES]:
        (x, y), (width, height), angle = cv2.minAreaRect(contour)
        angle %= 180
        if 45 < angle <= 135:  # a rectangle has two names: the one that lies flat
            width, height, angle = height, width, angle - 90
        elif angle > 135:
            angle -= 180
        if min(width, height) < MIN_SIDE:
            continue
        left, top, wide, high = cv2.boundingRect(contour)
        inside = np.zeros((high, wide), np.uint8)
        cv2.drawContours(inside, [contour - (left, top)], -1, 1, cv2.FILLED)
        if cv2.mean(text[top : top + high, left : left + wide], inside)[0] < BOX_THRESHOLD:
            continue
        border = GROWTH * width * height / (width + height)  # on both sides together
        yield Box(
            scale * (x + 0.5) - 0.5,
            scale * (y + 0.5) - 0.5,
            scale * (width + border),
            scale * (height + border),
            angle,
        )


def _alike(widths: Sequence[int]) -> Iterator[list[int]]:
    """Indices by width, cut where the next would be more than `ALIKE` times the narrowest."""
    piece: list[int] = []
    for i in sorted(range(len(widths)), key=widths.__getitem__):
        if piece and widths[i] > ALIKE * widths[piece[0]]:
            yield piece
            piece = []
        piece.append(i)
    if piece:
        yield piece


# --- int8 ----------------------------------------------------------------------------------------


@cache
def quantised() -> Path:
    """The recogniser with 8-bit weights and activations, made on first use and kept.

    In ``$RAY_SLO_CACHE`` (default ``~/.cache/ray-slo``) / ocr, named after all it is made from.
    """
    import onnxruntime

    source = model_path("rec")
    digest = hashlib.sha256(source.read_bytes())
    digest.update(Path(__file__).read_bytes() + Path(__file__).with_name("pages.py").read_bytes())
    digest.update(onnxruntime.__version__.encode())
    root = Path(os.environ.get("RAY_SLO_CACHE") or Path.home() / ".cache" / "ray-slo")
    target = root / "ocr" / f"rec-int8-{digest.hexdigest()[:12]}.onnx"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, then renamed: racing workers see a whole file or none.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            _quantise(source, Path(folder)).replace(target)
    return target


def _quantise(source: Path, folder: Path) -> Path:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    full = Recogniser(48, device="cpu")

    class Lines(CalibrationDataReader):
        def __init__(self) -> None:
            lines = [full.scale(line)[None] for line in calibration_lines()]
            self.inputs = iter([_feed(full.session, line) for line in lines])

        def get_next(self) -> Any:
            return next(self.inputs, None)

    # Scales per channel need opset 13; one scale for all reads nothing at all.
    network = onnx.version_converter.convert_version(onnx.load(source), 13)
    onnx.helper.set_model_props(network, full.session.get_modelmeta().custom_metadata_map)
    converted, prepared, made = (folder / f"{step}.onnx" for step in ("opset", "prepared", "int8"))
    onnx.save(network, converted)
    quant_pre_process(str(converted), str(prepared), skip_symbolic_shape=True)
    quantize_static(
        str(prepared),
        str(made),
        Lines(),
        op_types_to_quantize=["Conv", "MatMul", "Gemm"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        activation_type=QuantType.QUInt8,
    )
    return made


def calibration_lines() -> list[Grey]:
    """Lines of pages that no measurement uses."""
    from .pages import image, pages

    pictures = [image(page) for page in pages(CALIBRATION, CALIBRATION_SEED)]
    found = Detector(960, device="cpu")(pictures)
    return [box.crop(page) for page, boxes in zip(pictures, found, strict=True) for box in boxes]
