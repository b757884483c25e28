"""Boxes around things in a picture: the task of each, and its part of the picture."""

from __future__ import annotations

import math
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]  # (height, width, 3), RGB

VEHICLES = ("car", "bus", "truck", "motorcycle")
PERSON = "person"
MARGIN = 0.1  # share of the longer side, on every side: the surroundings help to classify a thing
HEAD = 0.3  # of a standing person's height
MIN_SIDE = 8  # pixels; smaller things cannot be classified


class Found(TypedDict):
    """A thing in a picture.

    label       category of COCO
    confidence  of the detector, 0..1
    box         left, top, right, bottom, in pixels of the picture
    """

    label: str
    confidence: float
    box: list[float]


def square(box: list[float], height: int, width: int, margin: float = MARGIN) -> tuple[int, ...]:
    """The smallest square of whole pixels around a box and its margin: left, top, right, bottom.

    It is moved into the picture, and cut if it is larger. Classifiers look at the middle square of
    their input, and would otherwise miss the ends of a long vehicle.
    """
    left, top, right, bottom = box
    side = math.ceil((1 + 2 * margin) * max(right - left, bottom - top, 1.0))
    ends = []
    for low, high, limit in ((left, right, width), (top, bottom, height)):
        length = min(side, limit)
        start = round((low + high - length) / 2)
        start = min(max(start, 0), limit - length)
        ends.append((start, start + length))
    (x0, x1), (y0, y1) = ends
    return x0, y0, x1, y1


def head(box: list[float]) -> list[float]:
    """The head of a person: a square at the top of the box, in the middle.

    A crouching or cut-off person fills a wide box. Then the head has its whole height.
    """
    left, top, right, bottom = box
    width, height = right - left, bottom - top
    side = min(max(HEAD * height, width / 2), height, width)
    middle = (left + right) / 2
    return [middle - side / 2, top, middle + side / 2, top + side]


def crop(picture: Picture, box: list[float]) -> Picture:
    """A copy of the square around a box, so that the picture need not be kept."""
    left, top, right, bottom = square(box, *picture.shape[:2])
    return picture[top:bottom, left:right].copy()


def large_enough(box: list[float]) -> bool:
    left, top, right, bottom = box
    return min(right - left, bottom - top) >= MIN_SIDE


def parts(found: list[Found]) -> tuple[list[Found], list[Found], list[Found]]:
    """The things as (vehicles, people, others). Things that are too small are others."""
    vehicles, people, others = [], [], []
    for thing in found:
        if thing["label"] in VEHICLES and large_enough(thing["box"]):
            vehicles.append(thing)
        elif thing["label"] == PERSON and large_enough(head(thing["box"])):
            people.append(thing)
        else:
            others.append(thing)
    return vehicles, people, others
