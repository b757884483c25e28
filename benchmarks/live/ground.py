"""The ground that faults of `live-chaos` strike: a cluster, an application, and load."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.live.asked import RATE, SLO_S, Asked, Load, Seen, recovery
from benchmarks.live.cluster import Raylets, raylets
from benchmarks.live.sleeper import Sleeper
from ray_slo.models.profiling import THREAD_VARIABLES
from ray_slo.serve.scheduler.lease import candidate_name

APP = "chaos"
SCHEDULER = f"{APP}#sleeper"
FRONTENDS = f"SERVE_REPLICA::{SCHEDULER}#"
WORKERS = f"SERVE_REPLICA::{SCHEDULER}-worker#"
ALPHA_S, BETA_S = 0.004, 0.08  # a batch of b takes ALPHA_S · b + BETA_S
PATIENCE_S = 40.0  # longest wait for the recovery


class Ordered(Sleeper):
    """A sleeper whose item is a number, or a number with orders: seconds to hang, kB to carry."""

    def __init__(
        self, runs: str, release: int = 1, alpha_s: float = ALPHA_S, beta_s: float = BETA_S
    ) -> None:
        super().__init__(alpha_s, beta_s)
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

    def actors(self, prefix: str) -> list[dict[str, Any]]:
        """Return the live actors whose names begin with `prefix`, in the order of process ids."""
        # `ray.util.state.list_actors` asks the dashboard, which these nodes run without.
        from ray._private.state import actors

        return sorted(
            (
                a
                for a in actors().values()
                if a["Name"].startswith(prefix) and a["State"] == "ALIVE"
            ),
            key=itemgetter("Pid"),
        )

    def pids(self, prefix: str) -> list[int]:
        """Return the process ids of `actors`."""
        return [actor["Pid"] for actor in self.actors(prefix)]

    def leader(self, within_s: float = 30.0) -> dict[str, Any]:
        """Return the actor of the scheduler that decides. It may be the one that began as the
        spare.

        Raises:
            TimeoutError: none leads.
        """
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            leads = [one["state"] == "leads" for one in self.status().get("schedulers", ())]
            names = [candidate_name(SCHEDULER, i) for i, leading in enumerate(leads) if leading]
            found = [a for a in self.actors(SCHEDULER) if a["Name"] in names]
            if found:
                return found[0]
            time.sleep(0.5)
        raise TimeoutError(f"no scheduler leads within {within_s:g} s")

    def busy_worker(self) -> int:
        """Return the process id of a worker with a batch in flight, or of any if none has."""
        workers = self.status()["workers"]
        busy = sorted(w for w, s in workers.items() if s["batches_in_flight"]) or sorted(workers)
        return self.pids(f"{WORKERS}{self.rng.choice(busy)}")[0]

    def deploy(self, app: Any) -> None:
        """Deploy the application that `build_app` makes of arguments, or Serve's own."""
        from ray import serve

        from ray_slo.serve import build_app

        built = build_app(app) if isinstance(app, dict) else app
        serve.run(built, name=APP, route_prefix="/")

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
                    if not workers:  # plain Serve
                        return
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


@dataclass(frozen=True)
class Fault:
    """A fault, and the application that it strikes.

    Attributes:
        says: what goes wrong, in a few words.
        strike: causes the fault; calls `Ground.hit` right before.
        on: makes the arguments of the application.
        after_s: how long the load continues after the fault.
        kb: size of every payload.
        path: HTTP path of the model, where there are several.
        before_s: how long the load lasts before the fault, at least.
        patience_s: longest wait for the recovery after the fault.
    """

    says: str
    strike: Callable[[Ground], None]
    on: Callable[[Ground], Any] = args
    after_s: float = 10.0
    kb: int = 0
    path: str = ""
    before_s: float = 5.0
    patience_s: float = PATIENCE_S
    rate: float = RATE
    slo_s: float = SLO_S


@contextlib.contextmanager
def ground_for(seed: int, quick: bool, *nodes: dict[str, Any], **how: Any) -> Iterator[Ground]:
    """Start a cluster on which nothing is deployed yet.

    Args:
        *nodes, **how: arguments of `raylets`.
    """
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
        raylets(*nodes, **how) as cluster,
    ):
        ground = Ground(cluster, Path(folder), np.random.default_rng(seed), quick, seed)
        ground.runs.mkdir()
        yield ground


def strike(ground: Ground, fault: Fault) -> tuple[Seen, dict[int, Asked]]:
    """Cause one fault under load; return its figures and all requests by number."""
    if ground.deployed != (kind := fault.on.__name__):
        ground.deploy(fault.on(ground))
        ground.deployed = kind
    ground.settle()
    before_s, after_s = (2.0, 3.0) if ground.quick else (fault.before_s, fault.after_s)
    ground.load = load = Load(
        ground.cluster.url,
        ground.seed,
        ground.sent,
        fault.rate,
        fault.kb,
        fault.path,
        fault.slo_s,
    )
    try:
        time.sleep(before_s + ground.rng.uniform(0.0, 1.0))
        fault.strike(ground)
        time.sleep(after_s)
        until = ground.struck[0] + (0.0 if ground.quick else fault.patience_s)
        while recovery(load.over(), ground.struck[0]) is None and time.monotonic() < until:
            time.sleep(1.0)
    finally:
        load.stop()
    asked = load.asked
    ground.sent += len(asked)
    struck_s, in_flight = ground.struck
    return Seen.of(fault.says, struck_s, in_flight, asked, ground.runs), asked
