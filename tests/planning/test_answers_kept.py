"""What the smaller planners answer to random problems is what they answered when recorded."""

import random
from dataclasses import replace

import pytest

from ray_slo.planning import best_effort, loki, routing
from ray_slo.planning.loki.plans import Assignment, explain, swaps_of
from ray_slo.planning.meanwhile import Plans
from ray_slo.planning.placement import place
from ray_slo.planning.result import Infeasible
from tests.kept import condensed, kept
from tests.planning.examples import loki as loki_examples

FILE = "planning/answers"


def assignments(rng, tasks=("t", "u", "v")):
    return tuple(
        Assignment(task, f"{task}{i}", 2, rng.randint(1, 3), rng.randint(0, 12) / 2, 4.0, 0.02)
        for task in tasks
        for i in range(rng.randint(1, 2))
    )


def plan_of(rng):
    return loki.Plan("share", assignments(rng), (), 80.0, 40.0, 0.25, 1, 0.0, "so")


@pytest.mark.parametrize("seed", range(4))
def test_places(seed):
    rng, found = random.Random(seed), []
    for _ in range(40):
        plan = plan_of(rng)
        names = [a.variant for a in plan.assignments]
        count = rng.randint(1, plan.workers + 2)
        workers = {f"w{i}": rng.choice([None, "x", *names]) for i in range(count)}
        found += [place(plan, workers), plan.workers, plan.loaded]
        current = {(a.task, a.variant): rng.randint(0, 3) for a in plan.assignments}
        problem = replace(loki_examples.chain(), workers=rng.randint(2, 12))
        found.append(swaps_of(problem, current))
        moving = replace(problem, current={("detect", "d-large"): 2}, headroom_quantile=0.95)
        found += [swaps_of(moving, current), explain(moving, plan, 2), explain(problem, plan, 0)]
        made = Infeasible("too few", plan) if rng.random() < 0.5 else plan
        both = Plans(made, rng.choice([made, plan_of(rng)]), 3)
        found += [both.why, both.shortfall]
    kept(FILE, f"places {seed}", condensed(found))


@pytest.mark.parametrize("seed", range(4))
def test_routes(seed):
    rng, found = random.Random(seed), []
    parents = {"a": None, "b": "a", "c": "a", "d": "c"}
    for _ in range(30):
        workers = [
            routing.Worker(
                i,
                rng.choice(list(parents)),
                float(rng.choice([70, 80, 90])),
                rng.randint(0, 16) / 2,
                rng.choice([0.25, 0.5]),
                {"b": rng.choice([0.0, 0.5, 2.0])},
                rng.choice([None, 1.0, 4.0, 30.0]),
            )
            for i in range(rng.randint(4, 12))
        ]
        found.append(routing.most_accurate_first(parents, workers, rng.choice([0.0, 4.0, 16.0])))
    kept(
        FILE,
        f"routes {seed}",
        condensed([[r.frontend, r.tables, r.backup, r.incoming, r.unrouted] for r in found]),
    )


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("slo_s", [0.012, 0.03, 0.06, 0.15, 0.5])
def test_best_efforts_without_a_solver(shape, workers, slo_s):
    problem = replace(getattr(loki_examples, shape)(), workers=workers, slo_s=slo_s)
    found = []
    for demand in (0.5, 17.0, 300.0):
        asked = replace(problem, demand=demand, communication_s=0.001)
        found += [best_effort._time_shared(asked, in_turns) for in_turns in (True, False)]
        found.append(best_effort._fastest(asked))
    kept(FILE, f"best effort {shape}, {workers}, {slo_s}", condensed(found))
