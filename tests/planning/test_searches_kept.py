"""What searches do step by step is what they did when this was recorded.

An exact solver, or a later step, often hides what a step of a search found. Most figures here are
multiples of powers of two, so that sums are exact and ties are the same on every machine.
"""

import math
import random

import numpy as np
import pytest

from ray_slo.planning import herd, partition
from ray_slo.planning.herd.search import Search as Packing
from ray_slo.planning.partition.search import Search as Moves
from tests.kept import condensed, kept

FILE = "planning/searches"


def streams(seed):
    rng = random.Random(seed)
    models = tuple(
        herd.ModelStream(
            f"m{i}", rng.randint(0, 10) / 4, 8.0 * rng.randint(1, 8), rng.choice([0, 0, 2])
        )
        for i in range(rng.randint(3, 9))
    )
    return herd.Problem(
        models,
        rng.randint(4, 20),
        rng.randint(2, 8),
        rng.choice([64.0, 72.0, 128.0]),
        max_groups=rng.choice([None, 2, 4]),
        min_headroom=rng.choice([0.0, 0.5, 1.0]),
        exact_cells=0,
    )


def bins_of(search, bins):
    if bins is None:
        return None
    return [bins.size, bins.group, search.tolerance(bins), search.headroom(bins)]


@pytest.mark.parametrize("seed", range(24))
def test_the_packing_of_herd(seed):
    search = Packing(streams(seed))
    values = search.tolerances()
    found = {"tolerances": values, "limits": [search.limit, search.room]}
    for t in (0.0, *values[:: max(len(values) // 4, 1)].tolist(), math.inf):
        for headroom in (0.0, 1.0, 1.25):
            at = f"{t}, {headroom}"
            bins = search.pack(t, headroom)
            found[at] = [search.need(t), search.possible(t, headroom), bins_of(search, bins)]
            if bins is not None:
                for step in (search.level, search.split, search.balanced):
                    found[at].append(bins_of(search, step(bins, t)))
                found[at].append(bins_of(search, search.spend(bins)))
                made = search.to_plan(bins, 0.5 * t if t < math.inf else 1.0, "so")
                found[at].append([made, made.gap, made.headroom])
    partly = search.pack(values[-1], 1.0, partly=True)
    found["partly"] = [bins_of(search, partly), search.to_plan(partly, 1.0, "partly")]
    kept(FILE, f"herd {seed}", condensed(found))
    made = herd.plan(search.problem)
    kept(FILE, f"herd {seed}, plan", condensed(made))


def parts(seed, exact=True):
    rng = random.Random(seed)
    count, sub_clusters = rng.randint(2, 9), rng.choice([2, 4] if exact else [2, 3])

    def drawn(most):
        return float(rng.randint(0, most)) if exact else rng.uniform(0, most)

    models = tuple(partition.Model(f"m{i}", drawn(12), drawn(16), drawn(6)) for i in range(count))
    rates, memory = sum(m.rate for m in models), sum(m.static_mb for m in models)
    current = tuple(rng.randint(-1, sub_clusters - 1) for _ in range(count))
    return partition.Problem(
        models,
        sub_clusters=sub_clusters,
        max_rate=rng.choice([math.inf, rates / sub_clusters + 8]),
        max_memory_mb=rng.choice([math.inf, memory / sub_clusters + 12]),
        memory_weight=rng.choice([None, 0.0, 0.5]),
        current=rng.choice([None, current]),
        change_cost=rng.choice([None, tuple(rng.choice([0.5, 1.0, 2.0]) for _ in range(count))]),
        max_change_cost=rng.choice([math.inf, 4.0]),
    )


@pytest.mark.parametrize("seed", range(24))
def test_the_first_assignments_of_partition(seed):
    search = Moves(parts(seed))
    found = {
        "bound": [search.bound(), search.impossible(), search.weight, search.scale],
        "change": [search.change, search.budget],
    }
    rng = random.Random(seed)
    groups = [search.start(), search.start(partly=True)]
    groups += [np.array([rng.randint(-1, search.parts - 1) for _ in search.rate]) for _ in range(4)]
    for i, group in enumerate(groups):
        totals = search.totals(group)
        found[f"group {i}"] = [group, totals, search.excess(*totals), search.spreads(group)]
        found[f"group {i}"] += [search.objective(group), search.changed(group)]
        found[f"group {i}"].append(search.to_plan(group, 1.0, "so"))
        if (group >= 0).all():
            found[f"group {i}"].append(search.dynamic_of_others(group))
    kept(FILE, f"partition {seed}", condensed(found))


@pytest.mark.parametrize("seed", range(100, 124))
def test_the_moves_of_partition(seed):
    """No two models are alike, so that no two moves are equally good."""
    search = Moves(parts(seed, exact=False))
    start = search.start()
    groups = [start, search.descend(start, 2), search.descend(start, 8)]
    best = search.run()
    found = [[group, search.objective(group)] for group in groups]
    found.append(None if best is None else search.objective(best))
    kept(FILE, f"partition {seed}", condensed(found))


@pytest.mark.parametrize("seed", range(100, 112))
def test_plans_of_partition_without_a_solver(seed):
    problem = parts(seed, exact=False)
    made = partition.plan(partition.Problem(**{**problem.__dict__, "time_limit_s": 0.0}))
    kept(FILE, f"partition {seed}, plan", condensed(made))
