"""Kairos+ beside random, genetic, annealing and Bayesian search.

How many configurations are evaluated until the best one (within 0.5 %) is. The best is known from
the search with certainty. Random searches: the median of several seeds. All skip
sub-configurations of what they evaluated. With `--quick`, the budget is $1.3/h.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.kairos.systems import Case, space, throughput
from benchmarks.peers.searches import SEARCHES, Space
from ray_slo.planning import kairos
from ray_slo.planning.kairos import Configuration

SOURCE = "Kairos Figure 11"


def run(quick: bool, seed: int) -> list[Row]:
    how = {"requests": 400 if quick else 2000, "tolerance": 0.03 if quick else 0.01, "seed": seed}
    rows = []
    for model in ("RM2",) if quick else ("RM2", "WND"):
        case = Case(model, budget=1.3 if quick else 2.5)
        named, counts, _ = space(case)
        known: dict[int, float] = {}
        evaluate = partial(_memoised, case, named, known, how)
        index = {repr(sorted(c.items())): i for i, c in enumerate(named)}
        plus, best = [], 0.0
        for margin in (0.01, None):
            found = kairos.search(
                case.problem(),
                lambda c, at=index, value=evaluate: value(at[repr(sorted(c.items()))]),
                margin=margin,
            )
            assert isinstance(found, kairos.Found)
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
                steps = search(Space(counts, evaluate), np.random.default_rng([seed, s]))
                counted.append(next((i for i, (_, v) in enumerate(steps, 1) if v >= enough), 0))
            rows += _rows(f"{label} · {name}", float(np.median(counted)), len(named))
    return rows


def _rows(label: str, first: float | None, whole: int) -> list[Row]:
    share = None if first is None else 100 * first / whole
    return [
        Row(label, "evaluations until the best", "", first),
        Row(label, "share", "% of the space", share),
    ]


def _memoised(
    case: Case, named: list[Configuration], known: dict[int, float], how: dict[str, Any], i: int
) -> float:
    if i not in known:
        known[i] = throughput(case, named[i], **how)
    return known[i]
