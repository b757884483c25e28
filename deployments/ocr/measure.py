"""Measures every detector, recogniser and path of the two on rendered pages:
``python -m deployments.ocr.measure [--pages N] [--seed S] [--write]``.

The accuracy is the end-to-end accuracy of characters: 1 minus the edits from the read text to the
true text, over its length. White space is not counted, and lines that were not found count as
wrong. A variant's accuracy is that of its path with the best variant of the other task. ``--write``
writes the figures into measured.json, which the application and its config use. Times are processor
time of one page or line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

from .app import MEASURED, READERS, SIDES, load_detector, load_recogniser
from .networks import Grey
from .pages import Page, errors, image, pages

T = TypeVar("T")

PAGES, SEED = 60, 1  # the series of the published figures


def measure(
    series: Sequence[Page],
    detectors: Sequence[str] = tuple(SIDES),
    readers: Sequence[str] = tuple(READERS),
) -> dict[str, Any]:
    """Accuracies (percent), lines found per page, and milliseconds, by variant and path."""
    pictures = [image(page) for page in series]
    crops: dict[str, list[list[Grey]]] = {}
    milliseconds: dict[str, float] = {}
    for name in detectors:
        detector = load_detector(name, device="cpu")
        detector(pictures[:1])
        boxes, seconds = timed(lambda d=detector: [d([p])[0] for p in pictures])  # type: ignore[misc]
        milliseconds[name] = 1e3 * seconds / len(series)
        crops[name] = [[b.crop(p) for b in of] for p, of in zip(pictures, boxes, strict=True)]
    paths: dict[str, float] = {}
    for reader in readers:
        recogniser = load_recogniser(reader, device="cpu")
        for name in detectors:
            texts, seconds = timed(
                lambda r=recogniser, c=crops[name]: [  # type: ignore[misc]
                    "".join(r([line])[0][0] for line in of_page) for of_page in c
                ]
            )
            wrong, total = (
                sum(part)
                for part in zip(
                    *(errors(p.lines, t) for p, t in zip(series, texts, strict=True)), strict=True
                )
            )
            paths[f"{name}/{reader}"] = round(100 * (1 - wrong / total), 2)
            if name == detectors[-1]:
                milliseconds[reader] = 1e3 * seconds / sum(map(len, crops[name]))
    return {
        "accuracies": {
            name: max(a for path, a in paths.items() if name in path.split("/"))
            for name in (*detectors, *readers)
        },
        "lines_per_page": {
            name: round(sum(map(len, crops[name])) / len(series), 2) for name in detectors
        },
        "path_accuracies": paths,
        "milliseconds": {name: round(ms, 1) for name, ms in milliseconds.items()},
        "written_lines_per_page": round(sum(len(p.lines) for p in series) / len(series), 2),
    }


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """The function's result, and its processor time."""
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--pages", type=int, default=PAGES, metavar="N")
    parser.add_argument("--seed", type=int, default=SEED, metavar="S")
    parser.add_argument("--write", action="store_true", help=f"to {MEASURED.name}")
    args = parser.parse_args()
    found = measure(pages(args.pages, args.seed))
    print(f"{args.pages} pages, {found['written_lines_per_page']} lines on each\n")
    print(f"{'detector':10} {'lines found':>11} {'ms/page':>8} {'accuracy':>9}")
    for name in SIDES:
        lines, ms = found["lines_per_page"][name], found["milliseconds"][name]
        print(f"{name:10} {lines:11.2f} {ms:8.1f} {found['accuracies'][name]:8.2f}%")
    print(f"\n{'recogniser':10} {'ms/line':>8} {'accuracy, with each detector':>31}")
    print(f"{'':19}" + "".join(f"{name:>9}" for name in SIDES))
    for reader in READERS:
        cells = [f"{found['path_accuracies'][f'{name}/{reader}']:8.2f}%" for name in SIDES]
        print(f"{reader:10} {found['milliseconds'][reader]:8.1f}" + "".join(cells))
    if args.write:
        about = {
            "pages": args.pages,
            "seed": args.seed,
            "rapidocr-onnxruntime": version("rapidocr-onnxruntime"),
            "onnxruntime": version("onnxruntime"),
        }
        del found["milliseconds"]  # of this machine, and of this hour
        MEASURED.write_text(json.dumps({"of": about, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
