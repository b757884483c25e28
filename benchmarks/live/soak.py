"""Live on Ray Serve: ten minutes at 110 % of capacity, with callers that leave; does anything grow?

The application has two frontends, a scheduler actor with a decision log, and two workers. The
workers sleep ℓ(b) = 150 ms + 20 ms · b for a batch of b. First the capacity is measured: answers in
time per second at 1.2 × the rate that two workers, taking turns, could finish. Then requests arrive
open-loop (Poisson). One caller in ten leaves before its deadline: it closes the connection, or
cancels the call. The other callers make up 110 % of the capacity, so the surplus is refused early.
Four fifths of the requests come over HTTP, the others as handle calls. Bodies have 8 kB.

Every few seconds each process is sampled. The samples are private resident memory, open files,
threads, CPU time, asyncio tasks of ray-slo's event loop, and blocks that Python has allocated.
Serve's proxy and controller, and Ray's raylet and GCS, are only shown for comparison.

With `--fault-every-s`, faults strike in turn: the newest worker or frontend, or the scheduler, is
killed, or stands still for two seconds. The first worker and the first frontend are never killed,
and the scheduler only in the first third. Only processes that live from the first third to the end
are judged.

Each quantity must be flat. Its median over the last third of the run may exceed that over the
second third by what `RULES` allows. If it exceeds this, the growth must be over: twice the
difference between the halves of the last third must be within the allowance. (A hiccup of the
machine raises the peak of memory once; a leak continues.) The first third is warm-up. After the
load, all tables of requests and batches must be empty, and there may be no more tasks than before.
*Lost* requests got neither an answer nor an error.

`python -m benchmarks live-soak [--minutes M | --hours H] [--fault-every-s S] [--out DIR]` exits
with status 1 if anything grew, was kept or was lost. DIR/soak.csv has the samples, DIR/soak.png the
plot. It runs with HAProxy (the fast mode), unless `--mode` says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.harness.rows import Failed, Row
from benchmarks.live.load import http, poisson
from benchmarks.live.modes import HAPROXY, MODES, OPTIMIZED, ORDINARY, environment
from ray_slo.load.drive import paced, status_of
from ray_slo.serve.proxy.modes import HAPROXY_ENV, OPTIMIZED_ENV

SOURCE = "ray-slo"
UNSAVED = ("out",)  # options that do not change the result
ALPHA_S, BETA_S = 0.02, 0.15
SLO_S = 0.9
WORKERS, FRONTENDS = 2, 2
MAX_BATCH = 24
OVERLOAD = 1.1
BY_HANDLE = 0.2  # share of all requests
LEAVING = 0.1  # share of all callers
LOST_AFTER_S = 15.0
BODY = 8_000  # bytes
OUT = Path("out/soak")
OURS = ("frontend", "scheduler", "worker")
FEWEST = 6  # samples that a judgement needs
KILL, PAUSE = "killed", "stands still"
FAULTS = (
    ("worker", KILL),
    ("frontend", PAUSE),
    ("frontend", KILL),
    ("worker", PAUSE),
    ("scheduler", KILL),
    ("scheduler", PAUSE),
)
PAUSE_S = 2.0
DIED = ("error ActorDiedError", "error ActorUnavailableError")
"""What Ray tells the caller of a handle whose frontend was killed."""
_LOOKS = 10  # longest wait after the load for empty tables, in looks of 2 s


@dataclass(frozen=True)
class Rule:
    """By how much a quantity may grow: a share of its value, plus an absolute amount."""

    share: float
    more: float

    def allowed(self, value: float) -> float:
        return self.share * value + self.more


RULES = {
    "memory, MB": Rule(0.02, 4.0),
    "files": Rule(0.0, 5.0),
    "threads": Rule(0.0, 3.0),
    "tasks": Rule(0.1, 10.0),  # each request that is being answered has a few
    "blocks": Rule(0.01, 10_000.0),
}


@dataclass(frozen=True)
class Growth:
    """How a quantity developed over the thirds of a run.

    Attributes:
        thirds: medians of the thirds.
        lately: median of the last third's second half, minus that of its first half.
        per_hour: slope over the last two thirds, per hour.
        allowed: allowed growth from the second to the last third.
    """

    thirds: tuple[float, float, float]
    lately: float
    per_hour: float
    allowed: float

    @property
    def flat(self) -> bool:
        return min(self.thirds[2] - self.thirds[1], 2 * self.lately) <= self.allowed


def growth(times_s: Sequence[float], values: Sequence[float], rule: Rule) -> Growth:
    """Return how a quantity developed over a run.

    Args:
        times_s: times of the samples in seconds, rising.

    Raises:
        ValueError: there are fewer than `FEWEST` samples.
    """
    if len(values) < FEWEST:
        raise ValueError(f"values: {FEWEST} samples or more are needed, got {len(values)}")
    parts = np.array_split(np.array(values), 3)
    first, second, last = (float(np.median(part)) for part in parts)
    early, late = (float(np.median(half)) for half in np.array_split(parts[2], 2))
    settled = len(parts[0])
    hours = np.array(times_s[settled:]) / 3600
    slope = round(float(np.polyfit(hours, values[settled:], 1)[0]), 3) + 0.0
    return Growth((first, second, last), late - early, slope, rule.allowed(second))


# -- the application -----------------------------------------------------------------------


def application(log_dir: str) -> Any:
    from ray_slo.serve import build_app

    return build_app(
        {
            "name": "soak",
            "models": {
                "sleeper": {
                    "callable": "benchmarks.live.sleeper:Sleeper",
                    "args": (ALPHA_S, BETA_S),
                    "latency_slo_ms": 1e3 * SLO_S,
                    "max_batch_size": MAX_BATCH,
                }
            },
            "workers": {
                "cpu": {"num_replicas": WORKERS, "ray_actor_options": {"num_cpus": 1}},
            },
            "num_frontends": FRONTENDS,
            "policy": "deferred",
            "profile_seconds": 3.0,
            "decision_log": {"dir": log_dir, "max_mb": 16.0},
        }
    )


def bound() -> float:
    """Return the requests per second that two workers, taking turns, can finish in time."""
    batch = min((SLO_S / (1 + 1 / WORKERS) - BETA_S) / ALPHA_S, MAX_BATCH)
    return WORKERS * batch / (BETA_S + ALPHA_S * batch)


# -- the load ------------------------------------------------------------------------------

Send = Callable[[], Awaitable[str]]


async def offer(send: Send, rate: float, seconds: float, leaving: float, seed: int) -> Counter[str]:
    """Send Poisson arrivals at `rate` (open loop), and return the counts by outcome.

    Args:
        send: sends one request; returns answered, late, refused, expired, or an error's text.
        leaving: share of callers that leave, at a random time before their deadline.
    """
    rng = np.random.default_rng(seed)

    def due() -> Iterator[tuple[float, float | None]]:
        for at in poisson(rate, rng, seconds):
            yield at, float(rng.uniform(0, SLO_S)) if rng.random() < leaving else None

    async def one(at: float, leaves_after_s: float | None) -> str:
        try:
            limit_s = LOST_AFTER_S if leaves_after_s is None else leaves_after_s
            return await asyncio.wait_for(send(), limit_s)
        except asyncio.TimeoutError:
            return "lost" if leaves_after_s is None else "cancelled"

    came = await paced(due(), one)
    return Counter(came) + Counter(sent=len(came))


def in_time(start: float) -> str:
    return "answered" if time.perf_counter() - start <= SLO_S else "late"


async def over_http(
    url: str, rate: float, seconds: float, leaving: float, seed: int
) -> Counter[str]:
    import aiohttp

    body, head = b'"' + b"x" * BODY + b'"', {"content-type": "application/json"}
    async with http() as session:

        async def send() -> str:
            start = time.perf_counter()
            try:
                async with session.post(url, data=body, headers=head) as response:
                    await response.read()
            except aiohttp.ClientError as error:
                return f"lost: {type(error).__name__}"
            if response.status == 200:
                return in_time(start)
            codes = {503: "refused", 408: "expired", 504: "expired"}
            return codes.get(response.status, f"error {response.status}")

        return await offer(send, rate, seconds, leaving, seed)


async def by_handle(
    handle: Any, rate: float, seconds: float, leaving: float, seed: int
) -> Counter[str]:
    item = "x" * BODY

    async def send() -> str:
        start = time.perf_counter()
        response = handle.remote(item)
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:
            status = status_of(error)
            return f"error {type(error).__name__}" if status == "error" else status
        return in_time(start)

    return await offer(send, rate, seconds, leaving, seed)


def http_process(*args: Any) -> Counter[str]:
    return asyncio.run(over_http(*args))


async def both(url: str, rate: float, seconds: float, leaving: float, seed: int) -> Counter[str]:
    """Send HTTP requests from a separate process, and handle calls from this one."""
    from ray import serve

    from ray_slo.demo.systems import APP

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        http = asyncio.get_running_loop().run_in_executor(
            pool, http_process, url, (1 - BY_HANDLE) * rate, seconds, leaving, 2 * seed
        )
        handle = serve.get_app_handle(APP)
        direct = by_handle(handle, BY_HANDLE * rate, seconds, leaving, 2 * seed + 1)
        return sum(await asyncio.gather(http, direct), Counter())


# -- sampling ------------------------------------------------------------------------------


class Lookout:
    """Samples every process of the application, and of Ray."""

    def __init__(self, csv_file: Any, log_dir: Path, faults: bool = False) -> None:
        import psutil
        from ray import serve

        from ray_slo.demo.systems import APP

        self._processes: dict[int, tuple[str, Any]] = {}
        self._log_dir = log_dir
        self._faults = faults
        self._frontends = serve.get_deployment_handle("soak", APP)
        self._workers = serve.get_deployment_handle("soak-cpu-worker", APP)
        self._file = csv_file
        self._writer = csv.writer(csv_file)
        self._writer.writerow(("at_s", "process", "quantity", "value"))
        self._start = time.monotonic()
        # Ray names its processes "ray::ProxyActor", or "ray::" and the method that runs.
        for process in psutil.Process().children(recursive=True):
            words = process.cmdline() or [""]
            title = words[0].rpartition("/")[2].removeprefix("ray::")
            for name, kind in {
                "ProxyActor": "Serve's proxy",
                "ServeController": "Serve's controller",
                "raylet": "raylet",
                "gcs_server": "GCS",
            }.items():
                if title.startswith(name):
                    self._name(process.pid, kind)

    def _name(self, pid: int, kind: str) -> str:
        import psutil

        if pid not in self._processes:
            count = sum(name.startswith(kind) for name, _ in self._processes.values())
            numbered = kind in ("frontend", "worker")
            name = f"{kind} {count + 1}" if numbered else f"{kind}{' again' * count}"
            self._processes[pid] = name, psutil.Process(pid)
        return self._processes[pid][0]

    def vitals(self) -> dict[str, dict[str, int]]:
        """Return what each of our processes reports of itself, by its name. Blocks the caller."""
        asked = [h.broadcast("slo_status") for h in (self._frontends, self._workers)]
        frontends, workers = (response.results(timeout_s=30) for response in asked)
        said = [("scheduler", frontends[0]["scheduler_process"])]
        said += [("frontend", status["process"]) for status in frontends]
        said += [("worker", status["process"]) for status in workers]
        said.sort(key=lambda one: (one[0], one[1]["pid"]))
        return {self._name(own["pid"], kind): own for kind, own in said}

    def newest(self, kind: str) -> tuple[str, int]:
        """Return the name and the id of the process of a kind that was started last."""
        alive = [(name, pid) for pid, (name, of) in self._processes.items() if of.is_running()]
        return [one for one in alive if one[0].startswith(kind)][-1]

    def look(self) -> dict[str, dict[str, int]]:
        """Write one sample of every quantity, and return `vitals()`. Blocks the caller."""
        import psutil
        from ray.exceptions import RayError

        at = f"{time.monotonic() - self._start:.1f}"
        found: dict[str, dict[str, int]] = {}
        try:
            found = self.vitals()
        except (RayError, TimeoutError, KeyError):  # a process that was just killed
            if not self._faults:
                raise
        for name, own in found.items():
            for quantity, value in own.items():
                if quantity != "pid":
                    self._writer.writerow((at, name, quantity, value))
        for name, process in self._processes.values():
            try:
                memory = process.memory_info()
                # Without shared memory, which has the pages of the object store.
                private = memory.rss - getattr(memory, "shared", 0)
                files, threads = process.num_fds(), process.num_threads()
                used = process.cpu_times()
            except psutil.NoSuchProcess:
                continue  # `complaints` reports the missing name
            self._writer.writerow((at, name, "memory, MB", f"{private / 2**20:.3f}"))
            self._writer.writerow((at, name, "files", files))
            self._writer.writerow((at, name, "threads", threads))
            self._writer.writerow((at, name, "CPU, s", f"{used.user + used.system:.2f}"))
        log_mb = sum(f.stat().st_size for f in self._log_dir.glob("**/*") if f.is_file()) / 2**20
        self._writer.writerow((at, "decision log", "on disk, MB", f"{log_mb:.3f}"))
        self._file.flush()
        return found


async def strike(lookout: Lookout, every_s: float, seconds: float, struck: Counter[str]) -> None:
    """Let the next of `FAULTS` strike every `every_s` until the load is almost over; count them."""
    start = time.monotonic()
    for kind, what in itertools.cycle(FAULTS):
        await asyncio.sleep(every_s)
        passed = time.monotonic() - start
        if passed > seconds - every_s / 2:
            return
        if kind == "scheduler" and passed > seconds / 3:
            what = PAUSE
        name, pid = lookout.newest(kind)
        print(f"{passed:.0f} s: {name} {what}", file=sys.stderr, flush=True)
        struck[f"{kind} {what}"] += 1
        if what == KILL:
            os.kill(pid, signal.SIGKILL)
            continue
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(PAUSE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def watch(lookout: Lookout, every_s: float) -> None:
    """Sample until cancelled."""
    while True:
        await asyncio.to_thread(lookout.look)
        await asyncio.sleep(every_s)


def kept(vitals: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return the tables that are not empty, by process."""
    own = {
        name: {k: v for k, v in held.items() if k not in ("pid", "tasks", "blocks") and v}
        for name, held in vitals.items()
    }
    return {name: tables for name, tables in own.items() if tables}


async def settled(lookout: Lookout) -> dict[str, dict[str, int]]:
    """Wait until all tables are empty, for at most 20 s, and return the last `vitals`."""
    for _ in range(_LOOKS):
        await asyncio.sleep(2.0)
        if not kept(found := await asyncio.to_thread(lookout.vitals)):
            break
    return found


# -- the run -------------------------------------------------------------------------------


@dataclass
class Soak:
    """The result of a soak."""

    capacity: float
    seconds: float
    counts: Counter[str]
    samples: pd.DataFrame  # at_s, process, quantity, value
    before: dict[str, dict[str, int]]
    after: dict[str, dict[str, int]]
    faults: Counter[str] = field(default_factory=Counter)  # faults that struck
    mode: str = ORDINARY
    growths: dict[tuple[str, str], Growth] = field(init=False)  # by (quantity, process)

    def __post_init__(self) -> None:
        self.growths = {}
        start, end = self.samples["at_s"].min(), self.samples["at_s"].max()
        for (quantity, process), series in self.samples.groupby(
            ["quantity", "process"], sort=False
        ):
            lived = (
                series["at_s"].min() <= start + (end - start) / 3 and series["at_s"].max() == end
            )
            if quantity in RULES and len(series) >= FEWEST and (lived or not self.faults):
                at, values = series["at_s"].tolist(), series["value"].tolist()
                self.growths[str(quantity), str(process)] = growth(at, values, RULES[str(quantity)])

    @property
    def lost(self) -> int:
        return sum(n for outcome, n in self.counts.items() if outcome.startswith("lost"))

    @property
    def errors(self) -> int:
        return sum(n for outcome, n in self.counts.items() if outcome.startswith("error"))

    @property
    def complaints(self) -> list[str]:
        """Messages about everything that grew, was kept or was lost."""
        found = [
            f"{process}: {quantity} grew from {g.thirds[1]:,.1f} to {g.thirds[2]:,.1f}, "
            f"{g.allowed:,.1f} more are allowed"
            for (quantity, process), g in self.growths.items()
            if process.startswith(OURS) and not g.flat
        ]
        found += [f"{name} still holds {left}" for name, left in kept(self.after).items()]
        if self.faults:
            was, now = (Counter(n.split()[0] for n in of) for of in (self.before, self.after))
            if was != now:
                found.append(f"there were {dict(was)} before and {dict(now)} after")
        else:
            for name in self.before.keys() ^ self.after.keys():
                found.append(f"{name} was not there all the time")
        for name in self.before.keys() & self.after.keys():
            tasks, had = self.after[name]["tasks"], self.before[name]["tasks"]
            if tasks > had + 2:
                found.append(f"{name} has {tasks} tasks after the load and had {had} before")
        bad = {k: v for k, v in self.counts.items() if k.startswith(("lost", "error"))}
        if set(bad) - set(DIED if self.faults else ()):
            found.append(f"not answered as they should be: {bad}")
        if not self.counts["answered"]:
            found.append("nothing was answered in time")
        return found

    def rows(self) -> list[Row]:
        counts = self.counts
        case = (
            f"{self.seconds / 60:.3g} minutes at {100 * OVERLOAD:.0f} % of capacity, {self.mode}"
            f"{f', {self.faults.total()} faults' if self.faults else ''} · all"
        )
        rows = [
            Row(case, "capacity", "requests/s", self.capacity),
            Row(case, "sent", "", counts["sent"]),
            *(
                Row(case, name, "", counts[name])
                for name in ("answered", "late", "refused", "expired", "cancelled")
            ),
            Row(case, "errors", "", self.errors),
            Row(case, "lost", "", self.lost),
            *(Row(f"faults · {name}", "times", "", n) for name, n in self.faults.items()),
        ]
        for quantity, rule in RULES.items():
            title = f"{quantity} (up to {100 * rule.share:g} % + {rule.more:g} more is flat)"
            for (of, process), g in self.growths.items():
                if of != quantity:
                    continue
                case = f"{title} · {process}"
                rows += [
                    *(
                        Row(case, f"{third} third", "", value)
                        for third, value in zip(("first", "second", "last"), g.thirds, strict=True)
                    ),
                    Row(case, "lately", "", g.lately),
                    Row(case, "per hour", "", g.per_hour),
                    Row(case, "flat", "", float(g.flat) if process.startswith(OURS) else None),
                ]
        cpu = self.samples[self.samples["quantity"] == "CPU, s"]
        for process, series in cpu.groupby("process", sort=False):
            used = 1e6 * (series["value"].max() - series["value"].min())
            rows.append(
                Row(f"CPU per request · {process}", "CPU", "µs", used / max(counts["sent"], 1))
            )
        for name, held in self.after.items():
            case = f"after the load · {name}"
            left = sum(kept({name: held}).get(name, {}).values())
            rows += [
                Row(case, "requests and batches held", "", left),
                Row(case, "tasks", "", held["tasks"]),
                Row(case, "tasks before", "", self.before.get(name, {}).get("tasks", math.nan)),
            ]
        return rows


async def soak(
    url: str,
    seconds: float,
    every_s: float,
    seed: int,
    out: Path,
    log: Path,
    fault_every_s: float | None = None,
) -> Soak:
    """Measure the capacity, apply the load while sampling, and wait until tables are empty."""
    tries_s = min(30.0, seconds)
    await both(url, 0.8 * bound(), 0.3 * tries_s, 0.0, seed)  # warm-up: connections, first batches
    tried = await both(url, 1.2 * bound(), tries_s, 0.0, seed + 1)
    capacity = tried["answered"] / tries_s
    rate = OVERLOAD * capacity / (1 - LEAVING)
    print(f"{capacity:.1f} requests/s are served in time; now {rate:.1f}", file=sys.stderr)
    path = out / "soak.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        struck: Counter[str] = Counter()
        lookout = await asyncio.to_thread(Lookout, file, log, fault_every_s is not None)
        before = await settled(lookout)
        watcher = asyncio.create_task(watch(lookout, every_s))
        loading = asyncio.create_task(both(url, rate, seconds, LEAVING, seed + 2))
        beside = {watcher}
        if fault_every_s:
            beside.add(asyncio.create_task(strike(lookout, fault_every_s, seconds, struck)))
        while not loading.done():
            ended, beside = await asyncio.wait(
                (loading, *beside), return_when=asyncio.FIRST_COMPLETED
            )
            beside.discard(loading)
            if any(one.exception() for one in ended):
                loading.cancel()
            for one in ended:
                one.result()
        for one in beside:
            one.cancel()
        await asyncio.wait(beside)
        counts = loading.result()
        after = await settled(lookout)
    return Soak(
        capacity, seconds, counts, pd.read_csv(path), before, after, struck, mode_of_serve()
    )


def mode_of_serve() -> str:
    """Return the mode of Serve that this process's environment chooses."""
    if os.environ.get(HAPROXY_ENV, "0") != "1":
        return ORDINARY
    return OPTIMIZED if os.environ.get(OPTIMIZED_ENV, "0") == "1" else HAPROXY


def in_mode(mode: str, arguments: Sequence[str]) -> list[Row]:
    """Run this program in a process whose environment chooses the mode, and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = ["live-soak", "--mode", mode, "--json", str(file), *arguments]
        done = subprocess.run([sys.executable, "-m", "benchmarks", *command], env=environment(mode))
        if not file.exists():
            raise SystemExit(done.returncode or 1)
        rows = [Row(**row) for row in json.loads(file.read_text())["rows"]]
    if done.returncode:
        raise Failed(rows, ["the complaints are above"])
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes",
        dest="seconds",
        type=partial(_seconds, 60),
        metavar="M",
        help="duration in minutes; default: 10",
    )
    length.add_argument(
        "--hours",
        dest="seconds",
        type=partial(_seconds, 3600),
        metavar="H",
        help="duration in hours",
    )
    parser.add_argument(
        "--mode", choices=MODES, default=HAPROXY, help=f"mode of Serve; default: {HAPROXY}"
    )
    parser.add_argument(
        "--fault-every-s",
        type=float,
        metavar="S",
        help="seconds between faults; default: no faults",
    )
    parser.add_argument(
        "--every-s",
        type=float,
        metavar="S",
        help="seconds between samples; default: 5, or 10 if the soak is longer than 1 h",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=OUT,
        help=f"folder for the samples and the plot; default: {OUT}",
    )


def _seconds(unit_s: float, text: str) -> float:
    seconds = float(text) * unit_s
    if not (seconds >= 10 and math.isfinite(seconds)):
        raise argparse.ArgumentTypeError(f"a soak takes 10 s or more, got {seconds:g} s")
    return seconds


def run(
    quick: bool,
    seed: int,
    seconds: float | None = None,
    every_s: float | None = None,
    out: Path = OUT,
    mode: str = ORDINARY,
    fault_every_s: float | None = None,
) -> list[Row]:
    """Run the soak. Raises `Failed` if anything grew, was kept or was lost."""
    from ray_slo.demo.systems import local_serve, running

    seconds = seconds or (20.0 if quick else 600.0)
    if every_s is None:
        every_s = 1.0 if quick else 5.0 if seconds <= 3600 else 10.0
    if not 0 < every_s <= seconds / 6:
        raise SystemExit(
            f"--every-s: must be above 0 and a sixth of the run or less, got {every_s:g}"
        )
    if fault_every_s is not None and not 5 * PAUSE_S <= fault_every_s <= seconds:
        raise SystemExit(
            f"--fault-every-s: must be from {5 * PAUSE_S:g} to the run's {seconds:g} s, "
            f"got {fault_every_s:g}"
        )
    if mode != mode_of_serve():
        arguments = ["--seed", str(seed), "--minutes", f"{seconds / 60:.17g}", "--out", str(out)]
        arguments += ["--every-s", f"{every_s:g}"]
        if fault_every_s is not None:
            arguments += ["--fault-every-s", f"{fault_every_s:g}"]
        return in_mode(mode, arguments)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as log, local_serve() as url, running(application(log)):
        done = asyncio.run(soak(url, seconds, every_s, seed, out, Path(log), fault_every_s))
    draw(done.samples, out / "soak.png")
    print(f"wrote {out / 'soak.csv'} and {out / 'soak.png'}", file=sys.stderr)
    if done.complaints:
        raise Failed(done.rows(), done.complaints)
    return done.rows()


def draw(samples: pd.DataFrame, path: Path) -> Path:
    """Draw every quantity of every process over time, with lines between the thirds.

    Memory and blocks are drawn as the difference from their value after one third.
    """
    from matplotlib.figure import Figure

    shown = [*RULES, "pending", "queued", "on disk, MB"]
    shown = [quantity for quantity in shown if (samples["quantity"] == quantity).any()]
    figure = Figure(figsize=(10, 2.0 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    end = samples["at_s"].max() / 60
    processes = list(dict.fromkeys(samples["process"]))
    for axis, quantity in zip(axes, shown, strict=True):
        of = samples[samples["quantity"] == quantity]
        change = quantity in ("memory, MB", "blocks")
        for process, series in of.groupby("process", sort=False):
            minutes, values = series["at_s"] / 60, series["value"]
            axis.plot(
                minutes,
                values - values[minutes >= end / 3].head(3).median() if change else values,
                "-" if str(process).startswith(OURS) else ":",
                color=f"C{processes.index(str(process)) % 10}",
                linewidth=1.2,
                label=str(process),
            )
        for third in (1, 2):
            axis.axvline(third * end / 3, color="0.8", linewidth=0.8)
        axis.set_ylabel(f"{quantity}, change" if change else quantity)
        if not change:
            axis.set_ylim(bottom=0)
        axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=110)
    return path


def plot(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Plot the run that was just made."""
    return [draw(pd.read_csv(OUT / "soak.csv"), directory / "soak.png")]
