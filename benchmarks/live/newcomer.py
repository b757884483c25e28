"""Live on Ray Serve: models that compute, on a machine that may do other things.

Three models (`benchmarks.live.computing`) are served as a newcomer would: on one or two replicas of
half a core, with the SLO as the only setting. It is a multiple of the time of a batch of one on the
machine that measures. The systems are `@serve.batch`, with the best of
several waits and bounds on what waits (`max_ongoing_requests`, `max_queued_requests`),
`@ray_slo.batch` in its place, and `@ray_slo.deployment`. The machine is quiet, or another process
computes beside them without a pause. The modes are Serve's own proxies (`ordinary`) and HAProxy
(`haproxy`); in both, ray-slo's settings are those of `ray-slo run`.

The load is a Poisson stream over HTTP, at multiples of what the replicas' processes do alone in
full batches, in the same surroundings. The load generator and Serve's proxies share the machine
with them.

* *in time*: share of all requests with an answer within the SLO. *Late*: share of the answers that
  came later. *Refused*: share of requests with an answer of status 503 or 504.
* *goodput*: answers within the SLO per second. */ workers*: as a share of the replicas' own rate of
  full batches during these streams: the best rate of any batch size, by the median time of its
  batches in all systems. */ plain*: as a multiple of plain Serve's.

    python -m benchmarks live-newcomer [--mode haproxy] [--model text] [--seconds 5]

A run of both modes takes an hour and a half. The parts can also run one by one, each with
`--json`. Then `--found` reads their rows, and runs nothing, as in `live-overhead`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.harness.rows import Row
from benchmarks.live.computing import CHECKED, MODELS, Model, full_rate, slo_s_of
from benchmarks.live.demo import ALONE, BESIDE, other_work
from benchmarks.live.load import by_http
from benchmarks.live.modes import HAPROXY, ORDINARY
from benchmarks.live.overhead import BATCH, PLAIN, Family, earlier, rows_found, served
from ray_slo.load.report import LoadResult
from ray_slo.load.workload import Payloads

__all__ = ["UNSAVED", "add_arguments", "earlier", "plot", "run"]

SOURCE = "ray-slo"
OURS = "embedded"
SYSTEMS = {PLAIN: "@serve.batch, tuned", BATCH: "@ray_slo.batch", OURS: "@ray_slo.deployment"}
FAMILIES = {"theirs": (PLAIN,), "ours": (BATCH, OURS)}  # each has a Ray cluster of its own
SHARES = (0.3, 0.7, 1.0, 2.0, 4.0)
TUNED_AT = {0.3: 0.7, 2.0: 2.0}  # from this share on, plain Serve is tuned at that one
WAITS = (0.1, 0.5)  # of `@serve.batch`, as multiples of the time of a batch of one
BOUNDS = (0.4, 0.8)  # requests that Serve lets in, as a share of what replicas do within the SLO
STREAM_S, TUNING_S = 5.0, 2.0
CPU = {"num_cpus": 0.5}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
FEW = 3  # batches of a size from which its time is taken
UNSAVED = ("found",)

ASKED = [
    ("*, 0.[37] × · @ray_slo.*", "in time", "≥", 98, "two cores for all, of uneven speed"),
    ("*, [124] × · @ray_slo.deployment", "goodput / workers", "≥", 0.85, "refusals cost CPU"),
    ("* × · @ray_slo.*", "goodput / plain", "≥", 1, "streams of 5 s on cores of uneven speed"),
    ("* × · @ray_slo.*", "late", "≤", 2, "the speed of the cores varied twofold within a run"),
]


@dataclass(frozen=True)
class Case:
    """A model with its SLO in seconds, on so many replicas."""

    name: str
    replicas: int
    slo_s: float

    @property
    def model(self) -> Model:
        return MODELS[self.name]


# -- the systems: this part runs in a process that starts a Ray cluster -------------------------


def theirs(system: str, case: Case, setting: dict[str, float]) -> Any:
    from ray import serve

    import ray_slo

    class Base:
        def __init__(self) -> None:
            self.model = case.model.made()

        async def __call__(self, request: Any) -> Any:
            return await self.predict(await request.json())

    class Plain(Base):
        def reconfigure(self, setting: dict[str, float]) -> None:
            self.predict.set_batch_wait_timeout_s(setting["wait_s"])

        @serve.batch(max_batch_size=CHECKED)
        async def predict(self, items: list[Any]) -> list[Any]:
            return self.model(items)

    class Batched(Base):
        @ray_slo.batch(1e3 * case.slo_s)
        def predict(self, items: list[Any]) -> list[Any]:
            return self.model(items)

    options: dict[str, Any] = {"num_replicas": case.replicas, "ray_actor_options": CPU}
    options["name"] = system
    if system == BATCH:
        return serve.deployment(Batched, max_ongoing_requests=256, **options).bind()
    bound = max(round(setting["let_in"]), 1)
    options |= {"max_ongoing_requests": bound, "max_queued_requests": bound}
    plain = serve.deployment(Plain, user_config=setting, **options)
    # With a version of its own, a new setting reaches running replicas. Serve has no public way.
    plain._version = "1"
    return plain.bind()


def ours(case: Case) -> Any:
    import ray_slo

    deployment = ray_slo.deployment(
        case.model.made,
        latency_slo_ms=1e3 * case.slo_s,
        num_replicas=case.replicas,
        ray_actor_options=CPU,
        name=OURS,
    )
    return deployment.bind()


def serve_family(case: Case, systems: Iterable[str]) -> None:
    """Serve each system at a path of its own, until stdin is closed.

    The port is printed to stdout. Each line on stdin is a new setting of plain Serve.
    """
    import ray
    from ray import serve

    from ray_slo.serve.proxy.modes import free_ports

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    (port,) = free_ports(1)
    setting = {"wait_s": 0.01, "let_in": 16.0}
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        for system in systems:
            app = ours(case) if system == OURS else theirs(system, case, setting)
            serve.run(app, name=system, route_prefix=f"/{system}")
        print(json.dumps({"port": port}), flush=True)
        for line in sys.stdin:
            setting = json.loads(line)
            app = theirs(PLAIN, case, setting)
            serve.run(app, name=PLAIN, route_prefix=f"/{PLAIN}")
            print(json.dumps(setting), flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


# -- a run -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What came of a stream.

    Attributes:
        statuses: number of requests by status, as in `ray_slo.load`.
        batches: size and seconds of the batch, of every answered request.
    """

    statuses: dict[str, int]
    window_s: float
    batches: list[tuple[int, float]]

    @classmethod
    def of(cls, result: LoadResult) -> Seen:
        said = [text.split(":") for text in result.measured["answer"] if isinstance(text, str)]
        batches = [(int(size), float(ms) / 1e3) for size, ms in said]
        return cls(result.summary["status"], result.summary["window_s"], batches)

    @property
    def sent(self) -> int:
        return sum(self.statuses.values())

    @property
    def goodput(self) -> float:
        return self.statuses["ok"] / self.window_s

    @property
    def late(self) -> float:
        answered = self.statuses["ok"] + self.statuses["late"]
        return self.statuses["late"] / answered if answered else 0.0


def stream(system: str, family: Family, case: Case, rate: float, seconds: float, seed: int) -> Seen:
    item = json.dumps(case.model.made.example_input()).encode()  # a text is JSON, too
    result = by_http(
        f"http://127.0.0.1:{family.port}/{system}",
        Payloads([item], content_type="application/json"),
        rate,
        duration_s=seconds * 1.25,
        warmup_s=seconds / 4,
        seed=seed,
        slo_s=case.slo_s,
        timeout_s=5.0,
    )
    seen, wrong = Seen.of(result), result.requests["status"] == "error"
    if seen.statuses["error"] > seen.sent / 2:
        raise RuntimeError(
            f"{system} of {case.name} fails: {result.requests['error'][wrong].iloc[0]}"
        )
    return seen


def _process(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def alone(case: Case) -> tuple[float, float]:
    """Return what as many processes as there are replicas do in full batches, in items per second,
    and the seconds of a batch of one. Each has one thread, as Ray gives half a core."""
    n = case.replicas
    with mock.patch.dict(os.environ, ONE_THREAD), _process(n) as pool:
        found = list(pool.map(full_rate, [case.name] * n, [case.slo_s] * n))
    return sum(rate for rate, _ in found), max(one_s for _, one_s in found)


def tuned(
    family: Family, case: Case, rate: float, capacity: float, one_s: float, seed: int
) -> None:
    """Give plain Serve the setting with the highest goodput."""
    within_slo = capacity / case.replicas * case.slo_s
    found = []
    for wait in WAITS:
        for bound in BOUNDS:
            setting = {"wait_s": wait * one_s, "let_in": bound * within_slo}
            family.say(setting)
            goodput = stream(PLAIN, family, case, rate, TUNING_S, seed).goodput
            found.append((goodput, -wait, -bound, setting))
    family.say(max(found, key=lambda tried: tried[:3])[3])


def measured(
    mode: str, name: str, replicas: int, quick: bool, seconds: float, seed: int
) -> list[Row]:
    """Run the streams of a model with so many replicas, and return their rows."""
    rows, systems = [], [PLAIN, OURS] if quick else list(SYSTEMS)
    with mock.patch.dict(os.environ, ONE_THREAD), _process(1) as pool:
        case = Case(name, replicas, pool.submit(slo_s_of, name).result())
    order = ["benchmarks.live.newcomer", name, str(replicas), str(case.slo_s)]
    with served(mode, order, systems, FAMILIES) as running:
        for around in (ALONE,) if quick else (ALONE, BESIDE):
            found: dict[tuple[float, str], Seen] = {}
            with other_work(around == BESIDE):
                capacity, one_s = alone(case)
                for share in (0.7, 2.0) if quick else SHARES:
                    if not quick and share in TUNED_AT:
                        at = TUNED_AT[share] * capacity
                        tuned(running[PLAIN], case, at, capacity, one_s, seed)
                    for system, family in running.items():
                        seen = stream(system, family, case, share * capacity, seconds, seed)
                        found[share, system] = seen
                        print(
                            f"{mode}, {name} x {replicas}, {around}, {share:g} x {capacity:.0f}/s"
                            f", {system}: {seen.statuses}",
                            file=sys.stderr,
                            flush=True,
                        )
            title = f"{mode}, {name}, {replicas} replica{'s' * (replicas > 1)}, {around}"
            rows.append(Row(f"{title} · setting", "SLO", "ms", 1e3 * case.slo_s))
            rows += rows_of(title, capacity, replicas, found)
    return rows


def rows_of(
    title: str, capacity: float, replicas: int, found: dict[tuple[float, str], Seen]
) -> list[Row]:
    workers = replicas * full(batch for seen in found.values() for batch in seen.batches)
    rows = [
        Row(f"{title} · setting", "alone, full batches", "/s", capacity),
        Row(f"{title} · setting", "workers, full batches", "/s", workers),
    ]
    for (share, system), seen in found.items():
        case = f"{title}, {share:g} × · {SYSTEMS[system]}"
        plain = found[share, PLAIN].goodput
        rows += [
            Row(case, "sent", "/s", seen.sent / seen.window_s),
            Row(case, "in time", "%", 100 * seen.statuses["ok"] / max(seen.sent, 1)),
            Row(case, "goodput", "/s", seen.goodput),
            Row(case, "goodput / workers", "×", seen.goodput / workers if workers else None),
            Row(case, "late", "%", 100 * seen.late),
            Row(case, "refused", "%", 100 * refused(seen)),
        ]
        if system != PLAIN and plain:
            rows.append(Row(case, "goodput / plain", "×", seen.goodput / plain))
    return rows


def refused(seen: Seen) -> float:
    return (seen.statuses["refused"] + seen.statuses["expired"]) / max(seen.sent, 1)


def full(batches: Iterable[tuple[int, float]]) -> float:
    """Return the best rate of a batch size, in items per second, by the median of its times."""
    times = defaultdict(list)
    for size, seconds in batches:
        times[size].append(seconds)
    rates = [n / statistics.median(t) for n, t in times.items() if len(t) >= FEW * n]
    return max(rates, default=0.0)


def plot(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Plot the goodput as a share of the workers' rate, over the load: one PNG per model."""
    from matplotlib.figure import Figure

    from benchmarks.harness.plots import saved

    panels: dict[str, dict[str, dict[str, list[tuple[float, float]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for row in rows:
        if row.metric == "goodput / workers" and row.ours is not None:
            cell, _, system = row.case.partition(" · ")
            mode, name, replicas, around, share = cell.split(", ")
            point = float(share.removesuffix(" ×")), row.ours
            panels[name][f"{mode}, {replicas}, {around}"][system].append(point)
    paths = []
    for name, cells in panels.items():
        figure = Figure(figsize=(12, 2.6 * (len(cells) + 3) // 4 + 1), layout="constrained")
        axes = figure.subplots(-(-len(cells) // 4), min(len(cells), 4), squeeze=False).flat
        for axis, (title, lines) in zip(axes, cells.items(), strict=False):
            for system, points in lines.items():
                axis.plot(*zip(*sorted(points), strict=True), "o-", label=system)
            axis.plot([0.3, 1, 4], [0.3, 1, 1], color="grey", linestyle=":", label="all in time")
            axis.set_xscale("log")
            axis.set_xticks(SHARES, [f"{share:g}" for share in SHARES])
            axis.minorticks_off()
            axis.set_ylim(0, 1.1)
            axis.set_title(title, fontsize=8)
        axes[0].set_ylabel("goodput / workers")
        axes[0].set_xlabel("load / capacity")
        axes[0].legend(fontsize=7)
        paths.append(saved(figure, directory, f"newcomer {name}"))
    return paths


# -- the program -------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=(ORDINARY, HAPROXY), help="only this one")
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--replicas", type=int, choices=(1, 2), help="only so many")
    parser.add_argument(
        "--seconds", type=float, default=STREAM_S, help=f"of a stream; default: {STREAM_S:g}"
    )
    parser.add_argument(
        "--found", metavar="A,B", help="run nothing, but read these files of --json"
    )


def run(
    quick: bool,
    seed: int,
    mode: str | None = None,
    model: str | None = None,
    replicas: int | None = None,
    seconds: float = STREAM_S,
    found: str | None = None,
) -> list[Row]:
    if found:
        return rows_found([Path(name) for name in found.split(",")], quick)
    rows = []
    for one in (mode,) if mode else (HAPROXY,) if quick else (ORDINARY, HAPROXY):
        for name in (model,) if model else ("network",) if quick else MODELS:
            for count in (replicas,) if replicas else (1,) if quick else (1, 2):
                rows += measured(one, name, count, quick, seconds, seed)
    return rows


if __name__ == "__main__":
    name, count, slo_s, _, *names = sys.argv[1:]
    serve_family(Case(name, int(count), float(slo_s)), names)
