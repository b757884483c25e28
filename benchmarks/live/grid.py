"""Cells of `policy-grid`, live: are the systems in the same order as in the simulator?

There are three cells, of seeds that were not used for tuning. Their models and workers fit on a
small machine. They are slowed down by a factor, so that there are tens of requests per second.
Models sleep as long as the cell's profile says, without the cell's noise. Every system gets the
same arrivals, which its frontend makes itself. The simulator gets them too, with the dispatch delay
that the live scheduler measured. Its figures are means of runs with half, once and twice that
delay. The reason: if a policy's batches collapse, its goodput depends on milliseconds.

*Goodput*: requests answered in time per second, after the warm-up. *Pairs in another order*: pairs
of systems whose order live is the opposite of the simulated one. Only pairs whose simulated
goodputs differ by more than 3 % of the requests count.

`auto` starts without experience in every run, live and simulated. It has made its first rehearsals
before the warm-up ends.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.live.load import bunches
from benchmarks.own.grid_cells import Cell, cell
from ray_slo.core import Cluster, DispatchDelay, LatencyProfile, Model, Variant
from ray_slo.core.profiles import save_profiles
from ray_slo.load.drive import paced
from ray_slo.policies.registry import live_arguments, policy_for
from ray_slo.serve.errors import SLOError
from ray_slo.serve.frontend.frontend import Frontend
from ray_slo.simulation import Times, Workload, simulate

SOURCE = "ray-slo"
ASKED = [
    (
        "*",
        "live off simulated",
        "≤",
        3,
        "Algorithm 1 as printed, which collapses in bursts; `auto` and `deferred` are within 1.2 %",
    ),
    ("*", "pairs in another order", "≤", 0),
]
SAME = 3.0
"""Percent of the requests: systems whose simulated goodputs differ by less have no order."""
CELLS = ((10, 60, 25.0), (10, 140, 20.0), (11, 74, 4.0))
"""Seed and number of each cell, and the factor by which it is slowed down."""
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("auto", {}),
    "deferred": ("deferred", {}),
    "deferred, as Algorithm 1": ("deferred", {"exact": True}),
    "eager": ("eager", {}),
}


@dataclass(frozen=True)
class Answered:
    """What became of one request.

    Attributes:
        at_s: when it was due, in seconds from the start.
        latency_s: from then until its answer or refusal.
    """

    at_s: float
    model: str
    is_answered: bool
    in_time: bool
    latency_s: float
    accuracy: float | None = None


class Driver(Frontend):
    """A frontend that makes its own requests, without clients."""

    async def drive(self, arrivals: Mapping[str, list[float]], **options: Any) -> list[Answered]:
        """Send all requests, and return what became of them when all have ended.

        Args:
            **options: more arguments of each request.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()

        async def one(at: float, model: str) -> Answered:
            try:
                answer = await self(0, model=model, response_metadata=True, **options)
            except SLOError:
                return Answered(at, model, False, False, loop.time() - start - at)
            latency_s = loop.time() - start - at
            return Answered(at, model, True, answer.deadline_met, latency_s, answer.accuracy)

        async def send(at: float, models: list[str]) -> list[Answered]:
            return await asyncio.gather(*(one(at, model) for model in models))

        return list(chain.from_iterable(await paced(bunches(arrivals), send, start=start)))


def driven(config: dict[str, Any]) -> Any:
    """Build an application whose frontend makes its own requests."""
    from ray_slo.serve.app import build

    with mock.patch.object(build, "Frontend", Driver):
        return build.build_app(config)


@dataclass(frozen=True)
class Slowed:
    """A cell whose times are multiplied by a factor.

    Attributes:
        times: the factor.
        tables: by model, the seconds that a batch of 1, 2, … takes.
        slos_s: SLO by model.
        arrivals: arrival times by model, in seconds.
    """

    of: Cell
    times: float
    tables: Mapping[str, list[float]]
    slos_s: Mapping[str, float]
    arrivals: Mapping[str, list[float]]
    warmup_s: float
    duration_s: float

    @classmethod
    def made(cls, seed: int, number: int, times: float, seconds: float, warmup_s: float) -> Slowed:
        """Make it of a cell's seed and number, with `seconds` of arrivals after the warm-up."""
        of = cell(seed, number)
        profiles = {m.name: m.variants[0].profiles["fast"] for m in of.models}
        duration_s = warmup_s + seconds
        requests = of.workload(duration_s / times).generate(
            of.cluster(), duration_s / times, np.random.default_rng([seed, number])
        )
        arrivals: dict[str, list[float]] = {m: [] for m in requests.models}
        for model, at in zip(requests.model.tolist(), requests.arrival.tolist(), strict=True):
            arrivals[requests.models[model]].append(at * times)
        return cls(
            *(of, times),
            {name: [times * t for t in p.table] for name, p in profiles.items()},
            {m.name: times * m.latency_slo_s for m in of.models},
            *(arrivals, warmup_s, duration_s),
        )

    @property
    def workers(self) -> int:
        return sum(kind.count for kind in self.of.kinds)

    @property
    def counted(self) -> int:
        """Number of requests that arrive after the warm-up."""
        return sum(at >= self.warmup_s for times in self.arrivals.values() for at in times)

    def __str__(self) -> str:
        return f"{self.of.says}, {self.times:g} times slower"


def run(quick: bool, seed: int) -> list[Row]:
    """Run all cells. Cells have their own seeds, so `seed` has no effect."""
    from ray_slo.demo.systems import local_serve

    seconds, warmup_s = (6.0, 3.0) if quick else (40.0, 15.0)
    systems = dict(list(SYSTEMS.items())[:2]) if quick else SYSTEMS
    rows: list[Row] = []
    with local_serve(), tempfile.TemporaryDirectory() as folder:
        for of in CELLS[:1] if quick else CELLS:
            slowed = Slowed.made(*of, seconds, warmup_s)
            found = {
                name: (*live(slowed, *system, Path(folder)), system)
                for name, system in systems.items()
            }
            goods = {
                name: (good, simulated(slowed, *system, delay_s))
                for name, (good, delay_s, system) in found.items()
            }
            rows += compared(slowed, goods)
    return rows


def live(of: Slowed, policy: str, kwargs: dict[str, Any], folder: Path) -> tuple[int, float]:
    """Run it live; return (requests in time, the dispatch delay that was measured, in s)."""
    from ray import serve

    from ray_slo.demo.systems import APP, running

    with running(application(of, policy, kwargs, folder)):
        handle = serve.get_app_handle(APP)
        answers = handle.drive.remote(of.arrivals).result()
        good = sum(a.in_time and a.at_s >= of.warmup_s for a in answers)
        return good, 1e-3 * handle.slo_status.remote().result()["dispatch_delay_ms"]


def application(of: Slowed, policy: str, kwargs: dict[str, Any], folder: Path) -> Any:
    """Build the application of a cell, with models that sleep."""
    models = {}
    for name, table in of.tables.items():
        file = folder / f"{name}.json"
        save_profiles(file, {name: LatencyProfile(table)})
        models[name] = {
            "callable": "benchmarks.live.sleeper:TableSleeper",
            "args": (table,),
            "profile": str(file),
            "latency_slo_ms": 1e3 * of.slos_s[name],
            "max_batch_size": len(table),
        }
    config = {
        "models": models,
        "workers": {"cpu": {"num_replicas": of.workers, "ray_actor_options": {"num_cpus": 1}}},
        "policy": {"name": policy, "kwargs": kwargs},
        "scheduler": "embedded",
        "profile_seconds": 0.1,
    }
    return driven(config)


def simulated(of: Slowed, policy: str, kwargs: dict[str, Any], delay_s: float) -> float:
    """Return the simulated number of requests in time, as a mean over three dispatch delays."""
    delays = (0.5 * delay_s, delay_s, 2 * delay_s)
    return float(np.mean([_simulated(of, policy, kwargs, delay) for delay in delays]))


def _simulated(of: Slowed, policy: str, kwargs: dict[str, Any], delay_s: float) -> int:
    models = [
        Model(name, of.slos_s[name], (Variant(name, {"default": LatencyProfile(table)}),))
        for name, table in of.tables.items()
    ]
    arguments = {**live_arguments(policy, 1e3 * min(of.slos_s.values())), **kwargs}
    report = simulate(
        policy_for(policy, arguments),
        Cluster.uniform(models, of.workers, delay=DispatchDelay(delay_s)),
        Workload(arrivals={name: Times(times_s=times) for name, times in of.arrivals.items()}),
        duration_s=of.duration_s,
        warmup_s=of.warmup_s,
    )
    return report.count("good")


def compared(of: Slowed, goods: Mapping[str, tuple[int, float]]) -> list[Row]:
    """Return the rows of a cell.

    Args:
        goods: by system, the requests in time (live, simulated).
    """
    seconds, counted = of.duration_s - of.warmup_s, of.counted
    rows: list[Row] = []
    for name, (seen, said) in goods.items():
        case = f"{of} · {name}"
        rows += [
            Row(case, "offered", "req/s", counted / seconds),
            Row(case, "goodput", "req/s", seen / seconds),
            Row(case, "simulated", "req/s", said / seconds),
            Row(case, "live off simulated", "% of requests", 100 * abs(seen - said) / counted),
        ]
    wrong = sum(
        abs(one[1] - other[1]) > SAME / 100 * counted
        and (one[0] - other[0]) * (one[1] - other[1]) < 0
        for one, other in combinations(goods.values(), 2)
    )
    return [*rows, Row(f"{of} · order", "pairs in another order", "", wrong)]
