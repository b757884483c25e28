"""Kairos+ compared with random, genetic, annealing and Bayesian search.

The rows count the configurations that are evaluated until the best one, or one within 0.5 % of it,
is found. The best is known from the search with certainty. Random searches have the median of
several seeds. All searches skip sub-configurations of those that they evaluated. With `--quick`,
the budget is $1.3/h.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.kairos.systems import Case, once_each, searched, space
from benchmarks.peers.searches import SEARCHES, Space

SOURCE = "Kairos Figure 11"


def run(quick: bool, seed: int) -> list[Row]:
    how = {"requests": 400 if quick else 2000, "tolerance": 0.03 if quick else 0.01, "seed": seed}
    rows = []
    for model in ("RM2",) if quick else ("RM2", "WND"):
        case = Case(model, budget=1.3 if quick else 2.5)
        named, counts, _ = space(case)
        own = once_each(case, **how)
        fresh = partial(Space, counts, lambda i, named=named, own=own: own(named[i]))
        plus, best = [], 0.0
        for margin in (0.01, None):
            found = searched(case.problem(), own, margin=margin)
            best = max(best, found.throughput)
            plus.append(found)
        enough = 0.995 * best
        label = f"{model}, space of {len(named)}"
        for name, found in zip(("Kairos+", "Kairos+, certain"), plus, strict=True):
            first = next((i for i, (_, v) in enumerate(found.evaluated, 1) if v >= enough), None)
            rows += _rows(f"{label} · {name}", first, len(named))
        for name, search in SEARCHES.items():
            counted = []
            for s in range(3 if quick else 10):
                steps = search(fresh(), np.random.default_rng([seed, s]))
                counted.append(next((i for i, (_, v) in enumerate(steps, 1) if v >= enough), 0))
            rows += _rows(f"{label} · {name}", float(np.median(counted)), len(named))
    return rows


def _rows(label: str, first: float | None, whole: int) -> list[Row]:
    share = None if first is None else 100 * first / whole
    return [
        Row(label, "evaluations until the best", "", first),
        Row(label, "share", "% of the space", share),
    ]
