"""What a report page shows of one run: columns for its charts, and words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ray_slo.cli.report_html import Details, Table

MOST_REQUESTS = 50_000  # in the charts; a page should open on a phone
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
    """One run, ready to be shown.

    Attributes:
        kind: what it was read from, in words.
        facts: (name, value) for the head of the page.
        data: for the charts; see `templates/report.js`.
        notes: what a reader should know before believing the page.
        tables: (heading, words, table).
        plans: decisions of the planner, as a table; None where there is none.
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
    """To 0.1 ms, as times are given to the page, and never up."""
    return math.floor(1e4 * float(seconds)) / 1e4


def rounded(values: Any, digits: int) -> list[float | None]:
    array = np.asarray(values, dtype=float)
    return [v if math.isfinite(v) else None for v in np.round(array, digits).tolist()]
