"""Live on Ray Serve: what a request costs compared with plain Serve, in every mode of Serve.

The same Poisson stream goes over HTTP to five systems. The first is `@serve.batch`, with the best
of several waits, which is searched in every cell. The second is `@ray_slo.batch` in its place. The
others are `@ray_slo.deployment`: with its scheduler in the only frontend, in an actor, and in an
actor with two frontends. Two replicas sleep 10 + 0.5·b ms (SLO 200 ms) or 20 + 4·b ms (SLO 250 ms)
for a batch of b. The modes are Serve's own proxies (`ordinary`), HAProxy (`haproxy`), and HAProxy
with Serve's throughput optimization (`optimized`). The first two systems share a Ray cluster that
has no settings of ray-slo. The others share a second cluster beside it.

A cell is a mode, a model, a size of the bodies and a rate. The systems of a cell take turns, in a
new random order every round. A figure is the median of three rounds, of 3 s each. Rounds are short,
because the speed of a machine may change from minute to minute.

* *CPU*: CPU time of all server processes per request, in milliseconds, without what they take while
  idle. By process: *proxy* (with HAProxy and its manager), *frontend* (the replica that gets the
  request first), *worker*, *scheduler*, *Ray* (all others). The load generator does not count.
* *bad*: share of requests without an answer within the SLO. *p50*, *p99*: latency of the answers,
  from when the request was due.
* *largest rate*: the rate at which 1 % are bad, by linear interpolation between the rates that were
  tried. If no rate has 1 %, it is the highest rate that was tried. After a rate at which more than
  10 % were bad, a system gets only the highest one: the overload.
* *in time*: requests per second that were answered within the SLO.

*/ plain*: as a multiple of `@serve.batch`'s figure in the same round; the median of the rounds.

    python -m benchmarks live-overhead [--mode haproxy] [--model fast] [--systems plain,embedded]

A run of all modes takes over an hour. The modes can also run one by one, each with `--json`. Then
`--found` reads their rows, and runs nothing:

    python -m benchmarks live-overhead --mode haproxy --json haproxy.json
    python -m benchmarks live-overhead --found ordinary.json,haproxy.json,optimized.json --save
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.live.cluster import descendants
from benchmarks.live.load import by_http, some_of
from benchmarks.live.modes import HAPROXY, MODES, OPTIMIZED, ORDINARY, environment
from benchmarks.live.sleeper import Sleeper
from ray_slo.load.report import LoadResult
from ray_slo.load.workload import Payloads
from ray_slo.serve.deadlines import PROXY_CALLBACK_ENV
from ray_slo.serve.proxy.modes import BINARY_ENV, BUFFER_ENV

SOURCE = "ray-slo"
BAD = 0.01  # share of bad requests that defines the largest rate
OVER = 0.10  # after a larger share of bad requests, a system gets only the highest rate
ROUNDS = 3
STREAM_S = 3.0  # length of a stream
REPLICAS = 2
WAITS = (0.25, 0.5, 1.0, 2.0)  # for `@serve.batch`, as multiples of the time of a batch of one
CPU = {"num_cpus": 0.1}
PROXY_CHECKS = (  # Serve's settings, in seconds
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S",
)

PLAIN, BATCH = "plain", "batch"
SYSTEMS = {
    PLAIN: "@serve.batch, tuned",
    BATCH: "@ray_slo.batch",
    "embedded": "@ray_slo.deployment",
    "actor": "@ray_slo.deployment, actor",
    "two": "@ray_slo.deployment, 2 frontends",
}
OURS = {"embedded": {}, "actor": {"scheduler": "actor"}, "two": {"num_frontends": 2}}
FAMILIES = {"theirs": (PLAIN, BATCH), "ours": tuple(OURS)}  # each has a Ray cluster of its own

ASKED = [  # "*p*" matches the two modes with HAProxy: only their names contain a p
    (
        "*p*, fast, 100 B, [59]00/s · @ray_slo.deployment",
        "CPU / plain",
        "≤",
        1.3,
        "met but for 900/s with the optimized settings: the frontend costs as much as plain "
        "Serve's replicas, and workers, rehearsals and HAProxy add 0.19 ms",
    ),
    (
        "*p*, fast, 100 B, [59]00/s · @ray_slo.batch",
        "CPU / plain",
        "≤",
        1.05,
        "met with HAProxy alone; with the optimized settings, plain Serve costs 0.6 to 0.8 ms, of "
        "which little is a large share",
    ),
    ("*p*, fast, 100 B, [59]00/s · @ray_slo.*", "bad", "≤", 0),
    ("*p*, fast, 100 B, [59]00/s · @ray_slo.deployment", "p50 / plain", "≤", 1),
    ("*p*, fast, 100 B, [59]00/s · @ray_slo.deployment", "p99 / plain", "≤", 1),
    (
        "*p*, fast, 2 MB, * · @ray_slo.deployment",
        "p99 / plain",
        "≤",
        1,
        "met with the optimized settings; with HAProxy alone, 0.1 % more, in rounds of 60 requests",
    ),
    ("*p*, fast, 100 B, largest rate · @ray_slo.deployment", "largest / plain", "≥", 1),
    ("*p*, slow, 100 B, largest rate · @ray_slo.deployment", "largest / plain", "≥", 1.15),
]


@dataclass(frozen=True)
class Model:
    """A model that sleeps α·b + β seconds for a batch of b.

    Attributes:
        cells: request rates (per second) to try, by size of the body in bytes.
    """

    alpha_s: float
    beta_s: float
    slo_s: float
    max_batch: int
    cells: dict[int, tuple[int, ...]]


MODELS = {
    "fast": Model(
        0.0005,
        0.010,
        0.2,
        64,
        {100: (300, 500, 900, 1100, 1300), 100_000: (200,), 2_000_000: (20,)},
    ),
    "slow": Model(0.004, 0.020, 0.25, 25, {100: (180, 300, 360, 420)}),
}
QUICK = {100: (60,)}


# -- the systems: this part runs in a process that starts a Ray cluster -------------------------


def theirs(system: str, model: Model, wait_s: float = 0.0) -> Any:
    """Return a deployment whose batch method is decorated by Serve or by ray-slo."""
    from ray import serve

    import ray_slo

    if system == PLAIN:
        batched = serve.batch(max_batch_size=model.max_batch, batch_wait_timeout_s=0.01)
    else:
        batched = ray_slo.batch(1e3 * model.slo_s, max_batch_size=model.max_batch)

    class Host:
        def reconfigure(self, config: dict[str, float]) -> None:
            if "wait_s" in config:
                self.predict.set_batch_wait_timeout_s(config["wait_s"])

        @batched
        async def predict(self, bodies: list[bytes]) -> list[int]:
            import asyncio

            await asyncio.sleep(model.alpha_s * len(bodies) + model.beta_s)
            return [len(body) for body in bodies]

        async def __call__(self, request: Any) -> int:
            answer: int = await self.predict(await request.body())
            return answer

    options = {"num_replicas": REPLICAS, "max_ongoing_requests": 2000, "ray_actor_options": CPU}
    config = {"wait_s": wait_s} if system == PLAIN else {}
    return serve.deployment(Host, name=system, user_config=config, **options).bind()


class Counted(Sleeper):
    """Returns the size of each body."""

    @staticmethod
    async def preprocess(body: bytes) -> bytes:  # on the event loop, as in `@serve.batch`'s class
        return body

    @staticmethod
    def example_input() -> bytes:
        return b""

    def __call__(self, bodies: list[bytes]) -> list[int]:
        self.run(len(bodies))
        return [len(body) for body in bodies]


def ours(system: str, model: Model) -> Any:
    import ray_slo

    deployment = ray_slo.deployment(
        Counted,
        latency_slo_ms=1e3 * model.slo_s,
        max_batch_size=model.max_batch,
        num_replicas=REPLICAS,
        ray_actor_options=CPU,
        frontend_actor_options={"num_cpus": 0},
        name=system,
        profile_seconds=3.0,
        **OURS[system],
    )
    return deployment.bind(model.alpha_s, model.beta_s)


def serve_family(family: str, systems: Sequence[str], model: Model) -> None:
    """Serve each system at a path of its own, until stdin is closed.

    The port is printed to stdout. Each line on stdin is a new wait for `@serve.batch`, in seconds.
    """
    import ray
    from ray import serve

    from ray_slo.serve.proxy.modes import free_ports

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    (port,) = free_ports(1)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        for system in systems:
            app = ours(system, model) if family == "ours" else theirs(system, model, 0.01)
            serve.run(app, name=system, route_prefix=f"/{system}")
        print(json.dumps({"port": port}), flush=True)
        for line in sys.stdin:
            serve.run(theirs(PLAIN, model, float(line)), name=PLAIN, route_prefix=f"/{PLAIN}")
            print(json.dumps({"wait_s": float(line)}), flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


@dataclass
class Family:
    """The process that serves the systems of one family."""

    process: subprocess.Popen[str]
    port: int = 0

    def told(self) -> dict[str, Any]:
        """Wait for the process's next message, and return it.

        Raises:
            RuntimeError: the process ended instead.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                said: dict[str, Any] = json.loads(line)
                return said
        raise RuntimeError("a cluster ended while it was needed")

    def say(self, setting: Any) -> None:
        """Give a setting of `@serve.batch` to the process, and return when it is in force."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(setting)}\n")
        self.process.stdin.flush()
        self.told()

    def cpu_s(self, system: str) -> Counter[str]:
        """Return the CPU seconds of its processes so far, by their kind (see `kind_of`)."""
        found: Counter[str] = Counter()
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
                if kind := kind_of(command, system):
                    found[kind] += cpu_s(pid)
        return found


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process so far (Linux).

    Raises:
        OSError: the process does not exist.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kind_of(command: Sequence[str], system: str) -> str:
    """Return the role of a process for a system; empty if it belongs to another system."""
    title = command[0] if command else ""
    name = title.removeprefix("ray::").rpartition("/")[2]
    if name.startswith("ServeReplica:"):
        app, _, deployment = name.removeprefix("ServeReplica:").partition(":")
        if app != system:
            return ""
        return "worker" if "-worker" in deployment else "frontend"
    if name.startswith(("ProxyActor", "HAProxyManager", "haproxy")):
        return "proxy"
    return "scheduler" if "Scheduler" in name else "Ray"


@contextlib.contextmanager
def served(
    mode: str,
    order: Sequence[str],
    systems: Sequence[str],
    families: Mapping[str, Sequence[str]] = FAMILIES,
) -> Iterator[dict[str, Family]]:
    """Serve the systems in a mode, one Ray cluster per family; yield each system's `Family`.

    Args:
        order: the module that serves a family, and its first arguments. The family follows, and
            then the systems.
        families: the systems of each family. The first has plain Serve's settings.
    """
    running: dict[str, Family] = {}
    started = []
    try:
        for family, members in families.items():
            wanted = [system for system in members if system in systems]
            if not wanted:
                continue
            environ = environment(mode)
            if family == "theirs":  # plain Serve without the settings of ray-slo
                for variable in (PROXY_CALLBACK_ENV, BINARY_ENV, BUFFER_ENV):
                    environ.pop(variable, None)
            environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            # Serve kills a proxy that is too busy to answer its health checks, as in an overload.
            environ |= dict.fromkeys(PROXY_CHECKS, "60")
            process = subprocess.Popen(
                [sys.executable, "-m", *order, family, *wanted],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            started.append(process)
            one = Family(process)
            one.port = one.told()["port"]
            running |= dict.fromkeys(wanted, one)
        yield running
    finally:
        for process in started:
            assert process.stdin is not None
            process.stdin.close()
        for process in started:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# -- a run -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Figures of one stream at one system; CPU is in milliseconds per request."""

    bad: float
    p50_ms: float | None
    p99_ms: float | None
    cpu_ms: dict[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.cpu_ms.values())

    @classmethod
    def of(cls, result: LoadResult, used_s: Counter[str]) -> Run:
        said, sent = result.summary, max(len(result.requests), 1)
        cpu_ms = {kind: 1e3 * max(used, 0.0) / sent for kind, used in used_s.items()}
        return cls(said["bad_rate"], said["p50_ms"], said["p99_ms"], cpu_ms)


FIGURES: dict[str, Callable[[Run], float | None]] = {
    "CPU": attrgetter("total_ms"),
    "p50": attrgetter("p50_ms"),
    "p99": attrgetter("p99_ms"),
}


def idle(running: dict[str, Family], seconds: float = 1.0) -> dict[str, Counter[str]]:
    """Return the CPU time that each system takes without requests, in seconds per second."""
    found = {system: family.cpu_s(system) for system, family in running.items()}
    time.sleep(seconds)
    for system, before in found.items():
        now = running[system].cpu_s(system)
        found[system] = Counter({kind: (now[kind] - before[kind]) / seconds for kind in now})
    return found


def one_run(
    system: str,
    family: Family,
    model: Model,
    size: int,
    rate: float,
    seed: int,
    at_rest: Counter[str] | None = None,
) -> Run:
    """Send a stream, and return its figures.

    Args:
        at_rest: CPU seconds per second that the system takes without requests, by kind of
            process. They are subtracted. Default: none.
    """
    before, began = family.cpu_s(system), time.monotonic()
    result = by_http(
        f"http://127.0.0.1:{family.port}/{system}",
        Payloads([bytes(size)]),
        rate,
        duration_s=STREAM_S,
        warmup_s=STREAM_S / 4,
        seed=seed,
        slo_s=model.slo_s,
        timeout_s=10.0,
    )
    took_s = time.monotonic() - began
    now, at_rest = family.cpu_s(system), at_rest or Counter()
    return Run.of(
        result, Counter({kind: now[kind] - before[kind] - took_s * at_rest[kind] for kind in now})
    )


def tuned(family: Family, model: Model, size: int, rate: float, seed: int) -> None:
    """Set the wait of `@serve.batch` to the best: fewest bad requests, then the lowest p99."""
    best: tuple[tuple[float, float], float] | None = None
    for share in WAITS:
        wait_s = share * (model.alpha_s + model.beta_s)
        family.say(wait_s)
        run = one_run(PLAIN, family, model, size, rate, seed)
        key = (round(run.bad, 3), run.p99_ms or float("inf"))
        if best is None or (key, wait_s) < best:
            best = key, wait_s
    assert best is not None
    family.say(best[1])


def median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def middle(runs: Sequence[Run]) -> Run:
    """Return the median of each figure over several runs."""
    kinds = sorted({kind for run in runs for kind in run.cpu_ms})
    return Run(
        statistics.median(run.bad for run in runs),
        median([run.p50_ms for run in runs]),
        median([run.p99_ms for run in runs]),
        {kind: statistics.median(run.cpu_ms.get(kind, 0.0) for run in runs) for kind in kinds},
    )


def largest(bad: dict[float, float]) -> float | None:
    """Return the rate at which the share of bad requests reaches `BAD`, by linear interpolation.

    Returns None if the lowest rate has reached it, and the highest rate if no rate has.
    """
    rates = sorted(bad)
    good = None
    for rate in rates:
        if bad[rate] >= BAD:
            if good is None:
                return None
            share = (BAD - bad[good]) / (bad[rate] - bad[good])
            return float(good + share * (rate - good))
        good = rate
    return good


def ratio(
    runs: Sequence[Run], plain: Sequence[Run], figure: Callable[[Run], float | None]
) -> float | None:
    """Return the median, over the rounds, of a figure as a multiple of plain Serve's."""
    pairs = [(figure(run), figure(other)) for run, other in zip(runs, plain, strict=True)]
    return median([own / other if own is not None and other else None for own, other in pairs])


def measured(
    mode: str, name: str, systems: Sequence[str], quick: bool, seed: int
) -> dict[tuple[int, int, str], list[Run]]:
    """Return the run of each round, by (size, rate, system)."""
    model, rng = MODELS[name], np.random.default_rng(seed)
    found: dict[tuple[int, int, str], list[Run]] = {}
    over: set[tuple[int, str]] = set()
    with served(mode, ["benchmarks.live.overhead", name], systems) as running:
        for system, family in running.items():  # warm-up: opens connections, learns profiles
            one_run(system, family, model, 100, 50.0, seed)
        for size, rates in (QUICK if quick else model.cells).items():
            for rate in rates:
                is_overload = rate == max(rates)
                left = [s for s in running if is_overload or (size, s) not in over]
                if PLAIN in left and not quick:
                    tuned(running[PLAIN], model, size, rate, seed)
                runs: dict[str, list[Run]] = defaultdict(list)
                for turn in range(1 if quick else ROUNDS):
                    at_rest = idle({system: running[system] for system in left})
                    for system in map(str, rng.permutation(left)):
                        family = running[system]
                        run = one_run(
                            system, family, model, size, rate, seed + turn, at_rest[system]
                        )
                        runs[system].append(run)
                for system in left:
                    found[size, rate, system] = runs[system]
                    run = middle(runs[system])
                    said = f"{mode}, {name}, {size} B, {rate}/s, {system}"
                    print(f"{said}: {shown(run)}", file=sys.stderr, flush=True)
                    if run.bad > OVER:
                        over.add((size, system))
    return found


def shown(run: Run) -> str:
    parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in sorted(run.cpu_ms.items()))
    quantiles = " / ".join("–" if ms is None else f"{ms:.0f}" for ms in (run.p50_ms, run.p99_ms))
    return f"bad {run.bad:.1%}, {quantiles} ms, CPU {run.total_ms:.2f} ms ({parts})"


# -- rows, and a plot --------------------------------------------------------------------------


def size_said(size: int) -> str:
    for unit, bytes_ in (("MB", 1_000_000), ("kB", 1000)):
        if size >= bytes_:
            return f"{size / bytes_:g} {unit}"
    return f"{size} B"


def rows_of_cells(mode: str, name: str, found: dict[tuple[int, int, str], list[Run]]) -> list[Row]:
    rows, bad = [], defaultdict(dict)
    for (size, rate, system), runs in found.items():
        run = middle(runs)
        case = f"{mode}, {name}, {size_said(size)}, {rate}/s · {SYSTEMS[system]}"
        bad[size, system][float(rate)] = run.bad
        rows += [
            Row(case, "bad", "%", 100 * run.bad),
            Row(case, "in time", "/s", rate * (1 - run.bad)),
            Row(case, "p50", "ms", run.p50_ms),
            Row(case, "p99", "ms", run.p99_ms),
            Row(case, "CPU", "ms", run.total_ms),
            *(
                Row(case, kind, "ms", run.cpu_ms.get(kind, 0.0))
                for kind in ("proxy", "frontend", "worker", "scheduler", "Ray")
            ),
        ]
        plain = found.get((size, rate, PLAIN))
        if plain is not None and system != PLAIN:
            rows += [
                Row(case, f"{figure} / plain", "×", ratio(runs, plain, value))
                for figure, value in FIGURES.items()
            ]
    for (size, system), of_rate in bad.items():
        if len(of_rate) > 1:
            case = f"{mode}, {name}, {size_said(size)}, largest rate · {SYSTEMS[system]}"
            rows.append(Row(case, "largest rate", "/s", most := largest(of_rate)))
            plainly = largest(bad[size, PLAIN]) if (size, PLAIN) in bad else None
            if system != PLAIN and most is not None and plainly is not None:
                rows.append(Row(case, "largest / plain", "×", most / plainly))
    return rows


def plot(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Plot p99 over the rate: one PNG per mode and model, one line per system."""
    from matplotlib.figure import Figure

    from benchmarks.harness.plots import saved

    panels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cell, _, system = row.case.partition(" · ")
        mode, name, size, rate = cell.split(", ")
        if row.metric == "p99" and row.ours is not None and size == "100 B":
            panels[f"{mode}, {name}"][system].append((float(rate.removesuffix("/s")), row.ours))
    paths = []
    for title, lines in panels.items():
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for system, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=system)
        slo_ms = 1e3 * MODELS[title.rpartition(", ")[2]].slo_s
        axes.axhline(slo_ms, color="grey", linestyle=":", label="SLO")
        axes.set_xlabel("requests/s")
        axes.set_ylabel("p99 (ms)")
        axes.set_ylim(0, 2 * slo_ms)
        axes.set_title(title)
        axes.legend()
        paths.append(saved(figure, directory, f"p99 {title}"))
    return paths


# -- the program -------------------------------------------------------------------------------

chosen = partial(some_of, SYSTEMS, "system")
UNSAVED = ("found",)


def rows_found(files: Sequence[Path], quick: bool) -> list[Row]:
    """Return the rows of runs that were written with `--json`.

    Raises:
        SystemExit: a run has another length than asked for, or two runs have the same row.
    """
    rows: dict[tuple[str, str], Row] = {}
    for file in files:
        run = json.loads(file.read_text(encoding="utf-8"))
        if run["quick"] != quick:
            raise SystemExit(f"--found: {file} is a {'quick' if run['quick'] else 'full'} run")
        for said in run["rows"]:
            row = Row(**said)
            if rows.setdefault((row.case, row.metric), row) is not row:
                raise SystemExit(f"--found: {file} has a row of another file: {row.case}")
    return list(rows.values())


def earlier(found: str | None = None, **_: Any) -> tuple[float, float]:
    """Return the CPU seconds and the elapsed seconds of the runs that `--found` names."""
    runs = [json.loads(Path(name).read_text("utf-8")) for name in (found or "").split(",") if name]
    return sum(run["cpu_s"] for run in runs), sum(run["wall_s"] for run in runs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=MODES, help="only this one")
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument(
        "--systems", type=chosen, metavar="A,B", help=f"only these, of {', '.join(SYSTEMS)}"
    )
    parser.add_argument(
        "--found", metavar="A,B", help="run nothing, but read these files of --json"
    )


def run(
    quick: bool,
    seed: int,
    mode: str | None = None,
    model: str | None = None,
    systems: list[str] | None = None,
    found: str | None = None,
) -> list[Row]:
    if found:
        return rows_found([Path(name) for name in found.split(",")], quick)
    wanted = systems or ([PLAIN, "embedded"] if quick else list(SYSTEMS))
    rows = []
    for one in (mode,) if mode else (HAPROXY,) if quick else (ORDINARY, HAPROXY, OPTIMIZED):
        for name in (model,) if model else ("fast",) if quick else MODELS:
            rows += rows_of_cells(one, name, measured(one, name, wanted, quick, seed))
    return rows


if __name__ == "__main__":
    name, family, *names = sys.argv[1:]
    serve_family(family, names, MODELS[name])
