"""Pages of known text, drawn with matplotlib's fonts, and the errors of a reading.

Page i of a seed is the same everywhere. Lines differ in font, size, ink and length. Pages differ in
paper, number of lines (3 to 10), tilt, blur and noise. When a page is shrunk, small print is lost
first. The detector's input side decides how much.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

WIDTH, HEIGHT = 960, 720  # pixels
LINES = (3, 10)
SIZES = (13, 44)  # of a font, pixels; log-uniform
MARGIN = 30
FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSerif",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic",
)  # fmt: skip
_VOCABULARY = (
    "account address airport always amount answer april autumn balance bicycle bottle bridge "
    "bright building burger camera candle carbon careful cheese chicken coffee contract copper "
    "corner cotton credit customer dairy december delivery deposit discount doctor double "
    "drawing electric engine evening expert express fabric factory february ferry finger forest "
    "forward fresh garden general ginger glass grand green guitar harbour heavy history holiday "
    "honest hotel hundred import insurance invoice island january journey july jungle kettle "
    "kitchen ladder language lemon letter library light lunch machine market meadow measure "
    "member message minute monday morning motor museum nature network nothing november number "
    "object october office orange order oxygen package paper parking payment pencil pepper "
    "period piano picture planet pocket police postage pound power price private quality "
    "quantity quarter question quick railway receipt record refund rental return river saddle "
    "salmon saturday school season second sender service seven signal silver simple single "
    "special spring station street sugar summer supply table tailor taxable telephone thousand "
    "thursday ticket tomato total tower traffic travel tuesday umbrella unit valley value "
    "vanilla village vintage visitor voucher warranty water weather wednesday weekly welcome "
    "window winter wood yellow yesterday zero "
)
WORDS = _VOCABULARY.split()


@dataclass(frozen=True)
class Page:
    """A page and its true text.

    png    its picture, grey, `HEIGHT` x `WIDTH`
    lines  the text on it, from top to bottom
    """

    png: bytes
    lines: tuple[str, ...]


def page(seed: int, index: int) -> Page:
    """Page ``index`` of the series ``seed``."""
    rng = np.random.default_rng((seed, index))
    paper = int(rng.integers(215, 256))
    picture = Image.new("L", (WIDTH, HEIGHT), paper)
    draw = ImageDraw.Draw(picture)
    lines: list[str] = []
    top = MARGIN + int(rng.integers(0, 30))
    for _ in range(rng.integers(LINES[0], LINES[1], endpoint=True)):
        font = _font(str(rng.choice(FONTS)), int(np.exp(rng.uniform(*np.log(SIZES)))))
        text = _text(rng, font)
        left = int(rng.integers(MARGIN, max(WIDTH - MARGIN - font.getlength(text), MARGIN) + 1))
        draw.text((left, top), text, fill=int(rng.integers(0, paper - 110)), font=font)
        lines.append(text)
        top += int(font.size * rng.uniform(1.4, 2.4))
        if top > HEIGHT - MARGIN - 1.5 * SIZES[1]:
            break
    angle = float(rng.uniform(-1, 1))
    picture = picture.rotate(angle, Image.Resampling.BICUBIC, fillcolor=paper)
    picture = picture.filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 0.8))))
    noisy = np.asarray(picture, np.float32) + rng.normal(0, rng.uniform(2, 10), (HEIGHT, WIDTH))
    file = io.BytesIO()
    Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(file, "PNG", compress_level=1)
    return Page(file.getvalue(), tuple(lines))


def pages(count: int, seed: int = 0) -> list[Page]:
    """The first ``count`` pages of a series."""
    return [page(seed, index) for index in range(count)]


def payloads() -> list[bytes]:
    """Payloads for `ray-slo bench --payload deployments.ocr:payloads`: twenty pages as PNGs."""
    return [page.png for page in pages(20)]


def image(page: Page) -> NDArray[np.uint8]:
    """Its pixels, (height, width), dark on light."""
    return np.asarray(Image.open(io.BytesIO(page.png)), np.uint8)


def line(text: str, size: int = 24) -> NDArray[np.uint8]:
    """One line, (height, width), cut out like a detector does."""
    font = _font(FONTS[0], size)
    left, top, right, bottom = (round(side) for side in font.getbbox(text))
    picture = Image.new("L", (right - left + size // 2, bottom - top + size // 2), 240)
    ImageDraw.Draw(picture).text((size // 4 - left, size // 4 - top), text, fill=30, font=font)
    return np.asarray(picture, np.uint8)


def errors(lines: Sequence[str], read: str) -> tuple[int, int]:
    """(wrong characters, characters) of a reading: edits that turn it into the truth, at most all.

    White space is not counted: the recogniser's language has next to none.
    """
    truth, read = ("".join(text.split()) for text in ("".join(lines), read))
    return min(edit_distance(truth, read), len(truth)), len(truth)


def edit_distance(one: str, other: str) -> int:
    """Levenshtein's: fewest insertions, deletions and exchanges."""
    codes = np.array([ord(c) for c in other])
    steps = np.arange(len(other) + 1)
    row = steps
    for i, character in enumerate(one, 1):
        # Without insertions first; these then run along the row: min over k <= j of row[k] + j - k.
        change = np.minimum(row[1:] + 1, row[:-1] + (codes != ord(character)))
        row = np.minimum.accumulate(np.concatenate(([i], change)) - steps) + steps
    return int(row[-1])


def _text(rng: np.random.Generator, font: ImageFont.FreeTypeFont) -> str:
    """Words, numbers, prices and dates that fit onto a line: the line of a letter or a bill."""
    room = rng.uniform(0.35, 1.0) * (WIDTH - 2 * MARGIN)
    text = ""
    while True:
        kind = rng.random()
        if kind < 0.7:
            word = str(rng.choice(WORDS))
            style = rng.random()
            word = word.capitalize() if style < 0.35 else word.upper() if style < 0.45 else word
        elif kind < 0.8:
            word = f"{rng.integers(1, 10**5):d}"
        elif kind < 0.9:
            word = f"${rng.integers(1, 500)}.{rng.integers(100):02d}"
        else:
            word = f"{rng.integers(1, 32)}/{rng.integers(1, 13)}/{rng.integers(1990, 2030)}"
        longer = f"{text} {word}".strip()
        if font.getlength(longer) > room and text:
            return text
        text = longer
        if len(text) > 60:
            return text


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(folder / f"{name}.ttf", size)
