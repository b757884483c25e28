"""Queries of unlike sizes on unlike machines: which machine gets which query?

A query is a list of 10 to 1000 items to rank. A fast machine can rank any list in time. Two slow
ones, which are cheaper to rent, can rank only short ones. The policy `kairos` matches queries to
machines by their time there. Workers measure these times at the start, and learn from every batch.
Both kinds are simulated: they sleep as long as the machine would compute.

Run: python examples/heterogeneous.py
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from typing import Any

import ray
from ray import serve

from ray_slo.errors import SLOError
from ray_slo.serve import build_app

SLO_MS = 400
RATE = 12  # queries/s
SECONDS = 5
MACHINES = {  # number of machines, milliseconds per query, milliseconds per item
    "fast": (1, 30, 0.1),
    "slow": (2, 4, 1.2),
}


class Ranker:
    """Stands for a network that scores items."""

    def __init__(self) -> None:
        self.machine = os.environ["MACHINE"]
        _, self.query_ms, self.item_ms = MACHINES[self.machine]

    def __call__(self, queries: list[list[float]]) -> list[tuple[str, list[float]]]:
        items = sum(map(len, queries))
        time.sleep((self.query_ms + self.item_ms * items) / 1e3)
        return [(self.machine, sorted(query, reverse=True)) for query in queries]

    @staticmethod
    def size(query: list[float]) -> int:
        """The size of a query in items. Profiles and `max_batch_size` count items, too."""
        return len(query)

    @staticmethod
    def example_input(size: int = 1) -> list[float]:
        return [0.0] * size


def application() -> Any:
    return build_app(
        {
            "models": {
                "ranker": {"callable": Ranker, "latency_slo_ms": SLO_MS, "max_batch_size": 1000}
            },
            "workers": {
                kind: {
                    "num_replicas": count,
                    "ray_actor_options": {
                        "num_cpus": 0.25,
                        "runtime_env": {"env_vars": {"MACHINE": kind}},
                    },
                }
                for kind, (count, _, _) in MACHINES.items()
            },
            "policy": "kairos",
        }
    )


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(proxy_location="Disabled")
        handle = serve.run(application(), name="ranker", route_prefix=None)
        draw = random.Random(0)
        sizes = [
            draw.randint(10, 150) if draw.random() < 0.7 else draw.randint(500, 1000)
            for _ in range(RATE * SECONDS)
        ]
        responses, start = [], time.perf_counter()
        for i, size in enumerate(sizes):
            time.sleep(max(0.0, start + i / RATE - time.perf_counter()))
            query = [draw.random() for _ in range(size)]
            responses.append(handle.remote(query, response_metadata=True))
        ranked: dict[str, list[int]] = defaultdict(list)
        in_time = 0
        for size, response in zip(sizes, responses, strict=True):
            try:
                answer = response.result()
            except SLOError:  # refused early: no machine could answer in time
                continue
            machine, ranking = answer.result
            assert len(ranking) == size
            ranked[machine].append(size)
            in_time += answer.deadline_met
        print(f"{in_time} of {len(sizes)} queries were answered within {SLO_MS} ms")
        for machine, done in ranked.items():
            print(f"{machine}: {len(done)} queries of {min(done)} to {max(done)} items")
        assert max(ranked["slow"], default=0) <= 150, "a long query went to a slow machine"
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
