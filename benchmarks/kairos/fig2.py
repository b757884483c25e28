"""Exploring configurations by simulated annealing: how many are worse than homogeneous.

The sizes have Ribbon's distribution. The paper leaves out configurations with less than 20
requests/s, and finds about 70 % of the others worse than the homogeneous pool. We leave out those
with less than a third of its throughput. All serve first come, first served, as in Figure 1, and
nothing is pruned.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.kairos.systems import RIBBON, Case, homogeneous, space, throughput
from benchmarks.peers.searches import Space, annealing
from ray_slo.papers.kairos import Configuration

SOURCE = "Kairos Figure 2"


def run(quick: bool, seed: int) -> list[Row]:
    how = {"requests": 500 if quick else 3000, "tolerance": 0.05 if quick else 0.02, "seed": seed}
    walks, steps = (1, 15) if quick else (5, 60)
    case = Case("RM2")
    base, _ = homogeneous(case, [RIBBON], **how)
    named, counts, _ = space(case)
    evaluate = partial(_evaluate, case, named, how)
    tried = []
    for walk in range(walks):
        rng = np.random.default_rng([seed, walk])
        search = annealing(Space(counts, evaluate, prune=False), rng)
        tried += [v for _, v in itertools.islice(search, steps)]
    values = np.array(tried) / base
    kept = values[values > 1 / 3]
    worse = 100 * float(np.mean(kept < 1)) if len(kept) else None
    label = f"RM2 · {walks} × {steps} evaluations"
    rows = [
        Row(label, "worse than homogeneous", "%", 100 * float(np.mean(values < 1)), None),
        Row(label, "worse, of those above a third", "%", worse, 70.0),
        Row(label, "best over homogeneous", "×", float(values.max())),
    ]
    return rows


def _evaluate(case: Case, named: list[Configuration], how: dict[str, Any], i: int) -> float:
    return throughput(case, named[i], RIBBON, **how)
