"""The size distribution changes: throughput over the first 20 evaluations.

RM2's sizes change from log-normal to Gaussian. Before the change, all schemes have the pool that
Kairos planned for log-normal sizes. *0*: throughput of that pool after the change. *1*, *5*, …:
that of the best configuration after so many evaluations. All figures are relative to the
homogeneous pool. Kairos evaluates none, so its new configuration is there at 1. Ribbon and CLKWRK
use Bayesian optimisation, Kairos+ its bounds.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.kairos import systems
from benchmarks.peers.searches import Space, bayesian

SOURCE = "Kairos Figure 12"
AT = (1, 5, 10, 20)


def run(quick: bool, seed: int) -> list[Row]:
    how = {"requests": 400 if quick else 3000, "tolerance": 0.05 if quick else 0.01, "seed": seed}
    marks = AT[:2] if quick else AT
    before, after = systems.Case("RM2"), systems.Case("RM2", sizes=systems.GAUSSIAN)
    base, _ = systems.homogeneous(after, **how)
    old, new = systems.planned(before.problem()), systems.planned(after.problem())
    named, counts, _ = systems.space(after)
    rows = []

    def add(name: str, first: float, values: list[float]) -> None:
        best = np.maximum.accumulate(values)
        label = f"RM2, over homogeneous · {name}"
        reached = {0: first} | {n: float(best[min(n, len(best)) - 1]) for n in marks}
        rows.extend(Row(label, str(n), "×", value / base) for n, value in reached.items())

    kept = systems.throughput(after, old.counts, **how)
    add("Kairos", kept, [systems.throughput(after, new.counts, **how)])
    found = systems.searched(
        after.problem(), partial(systems.throughput, after, **how), max_evaluations=marks[-1]
    )
    add("Kairos+", kept, [v for _, v in found.evaluated])
    for name, policy in (("Ribbon", systems.RIBBON), ("CLKWRK", systems.CLKWRK)):
        steps = bayesian(
            Space(counts, lambda i, p=policy: systems.throughput(after, named[i], p, **how)),
            np.random.default_rng(seed),
        )
        values = [v for _, v in itertools.islice(steps, marks[-1])]
        add(name, systems.throughput(after, old.counts, policy, **how), values)
    return rows
