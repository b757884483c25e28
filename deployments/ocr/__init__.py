"""Reads printed pages with a pipeline: text detection, then recognition of every line."""

from .app import (
    Detect,
    Recognise,
    detectors,
    join,
    load_detector,
    load_recogniser,
    pipeline,
    recognisers,
)
from .pages import payloads

__all__ = [
    "Detect",
    "Recognise",
    "detectors",
    "join",
    "load_detector",
    "load_recogniser",
    "payloads",
    "pipeline",
    "recognisers",
]


def __getattr__(name: str) -> object:
    """``deployments.ocr:app`` for ``serve run``. It is made on first use, because it needs Ray."""
    if name == "app":
        return pipeline().bind()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
