"""The content of a report page about one run: columns for its charts, and texts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ray_slo.cli.report_html import Details, Table

MOST_REQUESTS = 50_000  # largest number of requests in the charts, so that a phone can open a page
WORST = 10

# Outcome: (colour of the page, whether it is a violation).
OUTCOMES: dict[str, tuple[str, bool]] = {
    "good": ("good", False),
    "late": ("late", True),
    "dropped": ("dropped", True),
    "pending": ("pending", True),
    "ok": ("good", False),
    "refused": ("dropped", True),
    "expired": ("expired", True),
    "timeout": ("pending", True),
    "error": ("failed", True),
}


@dataclass
class Source:
    """The content of a page about one run.

    Attributes:
        title: title of the page.
        kind: kind of the run and its path, in words.
        facts: pairs (name, value) for the head of the page.
        data: data of the charts; see `templates/report.js`.
        notes: limits of the figures that a reader should know.
        tables: triples (heading, paragraphs, table).
        plans: the planner's decisions, as a table. None if there was no planner.
        worst: the worst requests, explained.
    """

    title: str
    kind: str
    facts: list[tuple[str, str]]
    data: dict[str, Any]
    worst: list[Details]
    notes: list[str] = field(default_factory=list)
    tables: list[tuple[str, list[str], Table]] = field(default_factory=list)
    plans: Table | None = None


def outcomes(names: Iterable[str]) -> dict[str, Any]:
    return {
        "outcomes": [{"name": n, "colour": OUTCOMES[n][0], "bad": OUTCOMES[n][1]} for n in names]
    }


def down(seconds: float) -> float:
    """Round a time down to 0.1 ms, the resolution of times on the page."""
    return math.floor(1e4 * float(seconds)) / 1e4


def rounded(values: Any, digits: int) -> list[float | None]:
    array = np.asarray(values, dtype=float)
    return [v if math.isfinite(v) else None for v in np.round(array, digits).tolist()]
