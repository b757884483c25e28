"""Live on Ray Serve: faults under load: what callers see, and how long recovery takes.

Poisson arrivals go over HTTP to an application whose workers sleep, as the host of an accelerator
does while it computes. A fault strikes at a random time, drawn from the seed. Each fault has a row:

* *in flight*: requests that were not answered yet when the fault struck.
* *refused*: requests that got a typed error with a reason (a table below counts the reasons).
* *lost*: requests that got neither an answer nor a typed error. *Overdue*: these came, but more
  than one second after the deadline. *Duplicated*: answers that came twice, or to another caller.
  Every request has a number, which the model's answer repeats.
* *run twice*: requests whose batch was completed more than once; workers record what they have run.
  This is right if a worker died with its results. The caller still gets one answer.
* *late*: requests that were answered after their deadline.
* *recovery*: seconds until the share of requests in time is back at 95 % of its value before the
  fault. It ends at the start of the first full second with that share, and is 0 if the share never
  fell below.

All faults run with Serve's proxies, and again with HAProxy (`haproxy`).

    python -m benchmarks live-chaos [--mode haproxy] [--faults worker,frontend] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.live.cluster import OBJECT_STORE_BYTES, Raylets, raylets
from benchmarks.live.load import Clients, some_of
from benchmarks.live.modes import HAPROXY, MODES, ORDINARY, rows_of, write_rows
from benchmarks.live.sleeper import Sleeper
from ray_slo.models.profiling import THREAD_VARIABLES

SOURCE = "ray-slo"
APP = "chaos"
SLO_S = 1.0
SCHEDULER = f"{APP}#sleeper"
FRONTENDS = f"SERVE_REPLICA::{SCHEDULER}#"
PLANNER = f"{APP}#grouped##planner"
WORKERS = f"SERVE_REPLICA::{SCHEDULER}-worker#"
GRACE_S = 1.0  # a caller must have an answer or an error within this time after the deadline
RATE = 40.0
ALPHA_S, BETA_S = 0.004, 0.08  # a batch of b takes ALPHA_S · b + BETA_S
DELAY = "CoreWorkerService.grpc_server.PushTask=5000:50000"  # from 5,000 to 50,000 µs
QUICK = ("worker", "scheduler")
WINDOW_S, BACK = 1.0, 0.95
LARGE_KB = 256  # size of a payload that goes through the object store
PATIENCE_S = 40.0  # longest wait for the recovery
UNHEARD_S = 10.0  # a client hangs up this long after the deadline


class Ordered(Sleeper):
    """A sleeper whose item is a number, or a number with orders: seconds to hang, kB to carry."""

    def __init__(self, runs: str, release: int = 1) -> None:
        super().__init__(ALPHA_S, BETA_S)
        self.runs = Path(runs)
        self.release = release

    @staticmethod
    def preprocess(item: Any) -> Any:
        load = np.zeros(item.get("kb", 0) * 1024, np.uint8)
        return int(item["id"]), float(item.get("hang_s", 0.0)), load

    @staticmethod
    def postprocess(result: Any) -> Any:
        number, release, load = result
        return {"id": number, "release": release, "kb": len(load) // 1024}

    @staticmethod
    def example_input() -> Any:
        return -1, 0.0, np.zeros(0, np.uint8)

    def __call__(self, items: list[Any]) -> list[Any]:
        super().__call__(items)
        time.sleep(max(hang_s for _, hang_s, _ in items))
        with (self.runs / str(os.getpid())).open("a") as file:  # remains when the process is killed
            file.writelines(f"{number}\n" for number, _, _ in items if number >= 0)
        return [(number, self.release, load) for number, _, load in items]


@dataclass
class Asked:
    """One request; times are in seconds on the client's clock.

    Attributes:
        reason: "answered", or the reason of the typed error; empty if it got neither.
        said: the response, or the client's error.
    """

    at_s: float
    done_s: float = math.nan
    reason: str = ""
    said: str = ""
    echo: int | None = None
    release: int = 0

    @property
    def latency_s(self) -> float:
        return self.done_s - self.at_s

    @property
    def answered(self) -> bool:
        return self.reason == "answered"

    @property
    def lost(self) -> bool:
        """Whether it got neither an answer nor a typed error until the client hung up."""
        return not self.reason

    @property
    def overdue(self) -> bool:
        return not self.latency_s <= SLO_S + GRACE_S

    @property
    def in_time(self) -> bool:
        return self.reason == "answered" and self.latency_s <= SLO_S


class Load(Clients):
    """HTTP clients whose requests each have a unique number."""

    def __init__(
        self, url: str, seed: int, first: int, rate: float = RATE, kb: int = 0, path: str = ""
    ) -> None:
        self.asked: dict[int, Asked] = {}
        self._numbers = iter(range(first, first + 10**9))
        self._kb = kb
        self._extra: list[dict[str, Any]] = []
        super().__init__(f"{url}/{path}", rate, seed, heard_s=SLO_S + UNHEARD_S)

    @property
    def in_flight(self) -> int:
        return sum(math.isnan(a.done_s) for a in list(self.asked.values()))

    def over(self) -> list[Asked]:
        """Return the requests whose SLO has ended by now."""
        now = time.monotonic()
        return [a for a in list(self.asked.values()) if a.at_s < now - SLO_S]

    def also(self, **order: Any) -> None:
        """Send one more request, with orders in its item."""
        self._extra.append(order)

    def _due(self) -> Iterator[tuple[float, dict[str, Any]]]:
        for at in self._times:
            yield at, {"kb": self._kb} if self._kb else {}
            while self._extra:
                yield at, self._extra.pop()

    async def _one(self, session: Any, at: float, order: dict[str, Any]) -> None:
        import aiohttp

        number = next(self._numbers)
        one = self.asked[number] = Asked(time.monotonic())
        headers = {"x-slo-latency-ms": f"{1e3 * SLO_S:g}"}
        try:
            async with session.post(
                self._url, json={"id": number, **order}, headers=headers
            ) as response:
                text = await response.text()
                with contextlib.suppress(ValueError):
                    body = json.loads(text)
                    if response.status == 200:
                        one.echo, one.release = body["id"], body["release"]
                        one.reason = "answered"
                    else:
                        one.reason = body.get("reason", "")
                one.said = f"{response.status} {text[:300]}"
        except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError) as error:
            one.said = f"{type(error).__name__}: {error}"
        one.done_s = time.monotonic()


@dataclass
class Seen:
    """What became of the requests before, during and after one fault."""

    fault: str
    struck_s: float
    in_flight: int
    sent: int = 0
    answered: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    overdue: int = 0
    duplicated: int = 0
    run_twice: int = 0
    late: int = 0
    recovery_s: float | None = math.nan
    releases: Counter[int] = field(default_factory=Counter)
    unheard: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, fault: str, struck_s: float, in_flight: int, asked: dict[int, Asked], runs: Path
    ) -> Seen:
        all_ = list(asked.values())
        ran = Counter(n for n in numbers_run(runs) if n in asked)
        echoes = Counter(a.echo for a in all_ if a.echo is not None)
        wrong = sum(a.echo is not None and a.echo != n for n, a in asked.items())
        return cls(
            fault,
            struck_s,
            in_flight,
            sent=len(all_),
            answered=sum(a.answered for a in all_),
            reasons=Counter(a.reason for a in all_ if a.reason not in ("", "answered")),
            lost=sum(a.lost for a in all_),
            overdue=sum(a.overdue for a in all_),
            duplicated=sum(count - 1 for count in echoes.values()) + wrong,
            run_twice=sum(count > 1 for count in ran.values()),
            late=sum(a.answered and not a.in_time for a in all_),
            recovery_s=recovery(all_, struck_s),
            releases=Counter(a.release for a in all_ if a.answered),
            unheard=[
                f"{a.at_s - struck_s:+.2f} s, {a.latency_s:.2f} s: {a.said}"
                for a in all_
                if a.lost or a.overdue
            ],
        )

    @property
    def said(self) -> str:
        """One line for the log, which is printed when the fault is over."""
        recovery = "never" if self.recovery_s is None else f"{self.recovery_s:.1f} s"
        return (
            f"{self.in_flight} in flight, {self.sent} sent, {self.answered} answered, "
            f"{dict(self.reasons)} refused, {self.lost} lost, {self.overdue} overdue, "
            f"{self.duplicated} duplicated, {self.run_twice} run twice, {self.late} late, "
            f"recovery {recovery}"
        )

    def rows(self, reasons: list[str]) -> list[Row]:
        figures = {
            "in flight": self.in_flight,
            "sent": self.sent,
            "answered": self.answered,
            "refused": sum(self.reasons.values()),
            "lost": self.lost,
            "overdue": self.overdue,
            "duplicated": self.duplicated,
            "run twice": self.run_twice,
            "late": self.late,
        }
        return [
            *(Row(self.fault, metric, "", value) for metric, value in figures.items()),
            Row(self.fault, "recovery", "s", self.recovery_s),
            *(Row(f"refused, by reason · {self.fault}", r, "", self.reasons[r]) for r in reasons),
        ]


def numbers_run(runs: Path) -> Iterator[int]:
    """Yield the number of every request that a worker completed, once per run."""
    for file in runs.iterdir():
        yield from (int(line) for line in file.read_text().splitlines())


def recovery(asked: list[Asked], struck_s: float) -> float | None:
    """Return the recovery time in seconds; None if the requests never recover."""
    before = [a.in_time for a in asked if a.at_s + SLO_S < struck_s]
    wanted = BACK * sum(before) / max(len(before), 1)
    last = max(a.at_s for a in asked) - WINDOW_S
    fell = False
    for start in np.arange(struck_s, last, 0.1):
        window = [a.in_time for a in asked if start <= a.at_s < start + WINDOW_S]
        good = bool(window) and sum(window) >= wanted * len(window)
        if fell and good:
            return float(start - struck_s)
        fell |= not good
    return None if fell else 0.0


# -- the cluster that faults strike ------------------------------------------------------------


@dataclass
class Ground:
    """A cluster, and the application that is deployed on it now.

    Attributes:
        deployed: name of the function that made the arguments of this application.
        sent: number of requests that all faults together have sent.
        struck: when the fault struck, and how many requests were in flight; set by `hit`.
    """

    cluster: Raylets
    folder: Path
    rng: np.random.Generator
    quick: bool
    seed: int = 0
    deployed: str = ""
    sent: int = 0
    load: Load | None = None
    struck: tuple[float, int] = (math.nan, 0)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def hit(self) -> None:
        """Record that the fault strikes now; call this right before it does."""
        assert self.load is not None
        self.struck = (time.monotonic(), self.load.in_flight)

    def status(self) -> dict[str, Any]:
        from ray import serve

        return serve.get_app_handle(APP).slo_status.remote().result(timeout_s=10)

    def pids(self, prefix: str) -> list[int]:
        """Return the process ids of live actors whose names begin with `prefix`."""
        # `ray.util.state.list_actors` asks the dashboard, which these nodes run without.
        from ray._private.state import actors

        return sorted(
            a["Pid"]
            for a in actors().values()
            if a["Name"].startswith(prefix) and a["State"] == "ALIVE"
        )

    def busy_worker(self) -> int:
        """Return the process id of a worker with a batch in flight, or of any if none has."""
        workers = self.status()["workers"]
        busy = sorted(w for w, s in workers.items() if s["batches_in_flight"]) or sorted(workers)
        return self.pids(f"{WORKERS}{self.rng.choice(busy)}")[0]

    def deploy(self, args: dict[str, Any]) -> None:
        from ray import serve

        from ray_slo.serve import build_app

        serve.run(build_app(args), name=APP, route_prefix="/")

    def settle(self, within_s: float = 60.0) -> None:
        """Wait until all replicas run, and the scheduler knows all workers."""
        from ray import serve

        until = time.monotonic() + within_s
        while time.monotonic() < until:
            with contextlib.suppress(Exception):
                app = serve.status().applications[APP]
                if app.status == "RUNNING" and all(
                    set(d.replica_states) == {"RUNNING"} for d in app.deployments.values()
                ):
                    workers = sum(
                        sum(d.replica_states.values())
                        for name, d in app.deployments.items()
                        if "-worker" in name
                    )
                    status = self.status()
                    found = status.get("workers") or {
                        w for g in status.get("groups", {}).values() for w in g.get("workers", ())
                    }
                    if len(found) == workers:
                        return
            time.sleep(0.3)
        raise TimeoutError(f"the application did not recover within {within_s:g} s")


def args(ground: Ground, **changes: Any) -> dict[str, Any]:
    """Return the usual application: three workers, and two frontends with a scheduler actor."""
    release = changes.pop("release", 1)
    workers = changes.pop("num_replicas", 3)
    env = changes.pop("env", None)
    options = {"num_cpus": 0.1, **({"runtime_env": {"env_vars": env}} if env else {})}
    return {
        "models": {"sleeper": model(ground, release)},
        "workers": {"default": {"num_replicas": workers, "ray_actor_options": options}},
        "num_frontends": 2,
        "frontend_actor_options": {**options, "num_cpus": 0},
        "profile_seconds": 1.0,
        "name": "sleeper",
        **changes,
    }


def model(ground: Ground, release: int = 1) -> dict[str, Any]:
    return {
        "callable": Ordered,
        "kwargs": {"runs": str(ground.runs), "release": release},
        "latency_slo_ms": 1e3 * SLO_S,
        "max_batch_size": 16,
    }


def grouped(ground: Ground) -> dict[str, Any]:
    """Return an application with a planner and two groups; requests go to one of its models."""
    cpu = {"default": {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.1}}}
    return {
        "models": {"sleeper": model(ground), "other": model(ground)},
        "groups": {
            "a": {"workers": cpu, "models": ["sleeper"]},
            "b": {
                "workers": {"default": {"ray_actor_options": {"num_cpus": 0.1}}},
                "models": ["other"],
            },
        },
        "num_frontends": 2,
        "profile_seconds": 1.0,
        "name": "grouped",
    }


# -- faults --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault, and the application that it strikes.

    Attributes:
        says: what goes wrong, in a few words.
        strike: causes the fault; calls `Ground.hit` right before.
        on: makes the arguments of the application.
        after_s: how long the load continues after the fault.
        mend: undoes the fault, whatever happened.
        kb: size of every payload.
        path: HTTP path of the model, where there are several.
    """

    says: str
    strike: Callable[[Ground], None]
    on: Callable[[Ground], dict[str, Any]] = args
    after_s: float = 10.0
    mend: Callable[[Ground], None] | None = None
    kb: int = 0
    path: str = ""


def kill(prefix: str) -> Callable[[Ground], None]:
    """Return a fault: SIGKILL for one of the actors whose names begin with `prefix`."""

    def strike(ground: Ground) -> None:
        pid = int(ground.rng.choice(ground.pids(prefix)))
        ground.hit()
        os.kill(pid, signal.SIGKILL)

    return strike


def kill_worker(ground: Ground) -> None:
    pid = ground.busy_worker()
    ground.hit()
    os.kill(pid, signal.SIGKILL)


def stop_worker(ground: Ground) -> None:
    stop(ground, ground.busy_worker())


def stop_frontend(ground: Ground) -> None:
    stop(ground, int(ground.rng.choice(ground.pids(FRONTENDS))))


def stop(ground: Ground, pid: int) -> None:
    ground.hit()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5 if ground.quick else 5.0)
    os.kill(pid, signal.SIGCONT)


def hang_batch(ground: Ground) -> None:
    assert ground.load is not None
    ground.hit()
    ground.load.also(hang_s=5.0 if ground.quick else 3600.0)


def stop_scheduler(ground: Ground) -> None:
    """Stop the scheduler several times, so that its messages are up to 0.4 s late."""
    [pid] = ground.pids(SCHEDULER)
    ground.hit()
    for _ in range(3 if ground.quick else 10):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(ground.rng.uniform(0.1, 0.4))
        os.kill(pid, signal.SIGCONT)
        time.sleep(ground.rng.uniform(0.1, 0.4))


def update(ground: Ground) -> None:
    ground.hit()
    ground.deploy(args(ground, release=2))
    ground.deployed = ""


def scale(ground: Ground) -> None:
    ground.hit()
    ground.deploy(args(ground, num_replicas=4))
    time.sleep(0.5 if ground.quick else 3.0)
    ground.deploy(args(ground, num_replicas=1))


def fill_store(ground: Ground) -> None:
    """Put 1.5 times as much into the object store as it holds.

    All of it stays referenced, so Ray cannot evict it.
    """
    import ray

    size = 8 * 1024**2
    ground.hit()
    held = [
        ray.get(ray.put(np.ones(size, np.uint8)))
        for _ in range(int(1.5 * OBJECT_STORE_BYTES / size))
    ]
    time.sleep(1.0 if ground.quick else 5.0)
    del held


def lose_node(ground: Ground) -> None:
    ground.hit()
    ground.cluster.kill(ground.cluster.nodes[1])


def jump(ground: Ground) -> None:
    ground.hit()
    for jump_s in (3600, -3600, 0):
        (ground.folder / "clock").write_text(f"{jump_s:+d}")
        time.sleep(1.0 if ground.quick else 3.0)


def one_worker(ground: Ground) -> dict[str, Any]:
    return args(ground, num_replicas=1)


def embedded(ground: Ground) -> dict[str, Any]:
    return args(ground, num_frontends=1)


def delayed(ground: Ground) -> dict[str, Any]:
    """Use Ray's own testing option: every call of our actors is delayed when it arrives."""
    return args(ground, env={"RAY_testing_asio_delay_us": DELAY})


def faked_clock(ground: Ground) -> dict[str, Any]:
    """Run under libfaketime, which reads the offset of the wall clock from a file.

    Monotonic clocks remain as they are.
    """
    (ground.folder / "clock").write_text("+0")
    env = {
        "LD_PRELOAD": str(faketime()),
        "FAKETIME_TIMESTAMP_FILE": str(ground.folder / "clock"),
        "FAKETIME_CACHE_DURATION": "1",  # s; without it, every look at the clock reads the file
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    return args(ground, env=env)


def on_two_nodes(ground: Ground) -> dict[str, Any]:
    """Place the frontends and two workers on the head, and two workers on a second node."""
    if len(ground.cluster.nodes) < 2:
        ground.cluster.add(num_cpus=2, resources={"there": 2})
    here, there = ({"num_cpus": 0.1, "resources": {node: 0.1}} for node in ("here", "there"))
    return args(
        ground,
        workers={
            "here": {"num_replicas": 2, "ray_actor_options": here},
            "there": {"num_replicas": 2, "ray_actor_options": there},
        },
        frontend_actor_options={"num_cpus": 0, "resources": {"here": 0.1}},
    )


def faketime() -> Path:
    """Return the path of the library in the package `libfaketime`.

    Raises:
        ModuleNotFoundError: the package is not installed.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    import libfaketime

    [library] = Path(libfaketime.__file__).parent.rglob("libfaketime.so.1")
    return library


FAULTS = {
    "worker": Fault("worker killed", kill_worker),
    "frontend": Fault("one of two frontends killed", kill(FRONTENDS)),
    "stopped-frontend": Fault("frontend stopped for 5 s", stop_frontend),
    "scheduler": Fault("scheduler killed", kill(SCHEDULER)),
    "pause": Fault("worker stopped for 5 s", stop_worker),
    "hang": Fault("batch that never ends", hang_batch, after_s=20.0),
    "pulses": Fault("scheduler stopped 10 times", stop_scheduler),
    "store": Fault("object store full", fill_store, kb=LARGE_KB),
    "update": Fault("rolling update", update, after_s=15.0),
    "scale": Fault("1 worker, 4, 1", scale, on=one_worker, after_s=8.0),
    "only-frontend": Fault("only frontend killed", kill(FRONTENDS), on=embedded),
    "planner": Fault("planner of groups killed", kill(PLANNER), on=grouped, path="sleeper"),
    "delay": Fault("calls delayed 5 to 50 ms", Ground.hit, on=delayed),
    "clock": Fault("wall clocks jump 1 h", jump, on=faked_clock),
    "node": Fault("node lost", lose_node, on=on_two_nodes),
}


# -- the run -------------------------------------------------------------------------------


chosen = partial(some_of, FAULTS, "fault")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--faults",
        type=chosen,
        metavar="A,B",
        help=f"cause only these faults, out of {', '.join(FAULTS)}",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        help="run only in this mode of Serve; default: ordinary and haproxy",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="write every request and its outcome to this folder"
    )


def run(
    quick: bool,
    seed: int,
    faults: list[str] | None = None,
    out: Path | None = None,
    mode: str | None = None,
) -> list[Row]:
    names = ",".join(faults or (QUICK if quick else FAULTS))
    rows: list[Row] = []
    for one in (mode,) if mode else (ORDINARY,) if quick else (ORDINARY, HAPROXY):
        folder = "" if out is None else str(out / one)
        rows += rows_of("benchmarks.live.chaos", one, [str(int(quick)), str(seed), names, folder])
    return rows


def struck(mode: str, quick: bool, seed: int, names: list[str], out: Path | None) -> list[Row]:
    """Start a cluster, strike one fault after another, and return the rows.

    Runs in a process of its own, in whose environment the mode is set.
    """
    all_seen = []
    with ground_for(seed, quick) as ground:
        for name in names:
            seen, asked = strike(ground, name)
            if mode != ORDINARY:
                seen.fault = f"{seen.fault}, {mode}"
            all_seen.append(seen)
            print(f"{mode}, {name}: {seen.said}", file=sys.stderr, flush=True)
            for line in seen.unheard[:3]:
                print(f"  {line}", file=sys.stderr)
            if out is not None:
                write(out, name, seen, asked)
    return rows(all_seen)


@contextlib.contextmanager
def ground_for(seed: int, quick: bool) -> Iterator[Ground]:
    """Start a cluster on which nothing is deployed yet."""
    # Ray runs its workers at niceness 15, so any other process on this machine would come first.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
        raylets({"num_cpus": 8, "resources": {"here": 8}}) as cluster,
    ):
        ground = Ground(cluster, Path(folder), np.random.default_rng(seed), quick, seed)
        ground.runs.mkdir()
        yield ground


def strike(ground: Ground, name: str) -> tuple[Seen, dict[int, Asked]]:
    """Cause one fault under load; return its figures and all requests by number."""
    fault = FAULTS[name]
    if ground.deployed != (kind := fault.on.__name__):
        ground.deploy(fault.on(ground))
        ground.deployed = kind
    ground.settle()
    before_s, after_s = (2.0, 3.0) if ground.quick else (5.0, fault.after_s)
    ground.load = load = Load(
        ground.cluster.url, ground.seed, ground.sent, kb=fault.kb, path=fault.path
    )
    try:
        time.sleep(before_s + ground.rng.uniform(0.0, 1.0))
        fault.strike(ground)
        time.sleep(after_s)
        until = ground.struck[0] + (0.0 if ground.quick else PATIENCE_S)
        while recovery(load.over(), ground.struck[0]) is None and time.monotonic() < until:
            time.sleep(1.0)
    finally:
        load.stop()
    asked = load.asked
    ground.sent += len(asked)
    struck_s, in_flight = ground.struck
    return Seen.of(fault.says, struck_s, in_flight, asked, ground.runs), asked


def rows(all_seen: list[Seen]) -> list[Row]:
    reasons = sorted({reason for seen in all_seen for reason in seen.reasons})
    made = [row for seen in all_seen for row in seen.rows(reasons)]
    return made


def write(out: Path, name: str, seen: Seen, asked: dict[int, Asked]) -> None:
    """Write `FAULT.csv`: every request, with times in seconds since the fault."""
    import pandas as pd

    out.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame({"number": number, **asdict(one)} for number, one in asked.items())
    frame["at_s"] -= seen.struck_s
    frame["done_s"] -= seen.struck_s
    frame.to_csv(out / f"{name}.csv", index=False)


if __name__ == "__main__":
    mode, file, quick, seed, names, folder = sys.argv[1:]
    out = Path(folder) if folder else None
    write_rows(file, struck(mode, quick == "1", int(seed), names.split(","), out))
