"""What the smaller planners answer to random problems is what they answered when recorded."""

import random

import pytest

from ray_slo.papers import routing
from tests.kept import condensed, kept

FILE = "papers/answers"


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
