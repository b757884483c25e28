"""The systems that the demo compares, and the local Ray they run on."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_slo.models.profiling import THREAD_VARIABLES

APP = "demo"


@dataclass(frozen=True)
class Settings:
    """What is equal for all systems, and the one wait that was tuned."""

    variant: str
    num_replicas: int
    max_batch_size: int
    slo_s: float
    tuned_wait_s: float

    @property
    def server_slo_ms(self) -> float:
        """What ray-slo is told: the client's SLO less a share for the way from and to it."""
        return round(0.9 * 1e3 * self.slo_s, 1)


@dataclass(frozen=True)
class System:
    """A way to serve digits: `app(settings)` is a Serve application at the route `/`."""

    key: str
    name: str
    about: str
    app: Callable[[Settings], Any]
    ours: bool = False


def plain(settings: Settings, wait_s: float, off_loop: bool = True) -> Any:
    """Plain Serve with `@serve.batch`."""
    from ray_slo.demo.digits import plain as module

    return module.app(
        settings.variant,
        num_replicas=settings.num_replicas,
        batch_wait_s=wait_s,
        max_batch_size=settings.max_batch_size,
        off_loop=off_loop,
    )


def _batch(settings: Settings) -> Any:
    from ray_slo.demo.digits import batched

    return batched.app(
        settings.server_slo_ms,
        settings.variant,
        num_replicas=settings.num_replicas,
        max_batch_size=settings.max_batch_size,
    )


def _deployment(settings: Settings) -> Any:
    import ray_slo
    from ray_slo.demo.digits import Digits

    deployment = ray_slo.deployment(
        Digits,
        latency_slo_ms=settings.server_slo_ms,
        num_replicas=settings.num_replicas,
        max_batch_size=settings.max_batch_size,
        ray_actor_options={"num_cpus": 1},
    )
    return deployment.bind(settings.variant)


DEFAULT_WAIT_S = 0.01  # of @serve.batch

SYSTEMS = (
    System(
        "default",
        "@serve.batch default",
        "10 ms wait; the network runs in a thread, the event loop stays free",
        lambda s: plain(s, DEFAULT_WAIT_S),
    ),
    System(
        "blocking",
        "@serve.batch blocking",
        "10 ms wait; the network blocks the event loop, where requests then pile up to batches",
        lambda s: plain(s, DEFAULT_WAIT_S, off_loop=False),
    ),
    System(
        "tuned",
        "@serve.batch tuned",
        "the best wait of those tried at this very load",
        lambda s: plain(s, s.tuned_wait_s),
    ),
    System("batch", "@ray_slo.batch", "the decorator exchanged, and an SLO given", _batch, True),
    System(
        "deployment",
        "@ray_slo.deployment",
        "one scheduler for all replicas, and an SLO given",
        _deployment,
        True,
    ),
)


def choose(keys: list[str] | None) -> list[System]:
    """The systems of these keys (default: all), in the order of `SYSTEMS`.

    Raises:
        ValueError: an unknown key; lists the valid ones.
    """
    valid = [system.key for system in SYSTEMS]
    if unknown := sorted(set(keys or ()) - set(valid)):
        raise ValueError(f"--system must be among {', '.join(valid)}; got {', '.join(unknown)}")
    return [system for system in SYSTEMS if not keys or system.key in keys]


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def local_serve() -> Iterator[str]:
    """A Ray of our own on the loopback interface, with Serve; yields the URL of its proxy."""
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))  # inherited by every replica
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray runs its workers at niceness 15: whatever else runs here would come first.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray
    from ray import serve

    here = str(Path.cwd())  # deployments/ lives in the working directory, not in the package
    paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    ray.init(
        address="local",
        num_cpus=8,  # slots to place actors in, not cores: replicas, frontend, proxy
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        port = free_port()
        serve.start(
            http_options={"host": "127.0.0.1", "port": port},
            logging_config={"log_level": "WARNING"},
        )
        yield f"http://127.0.0.1:{port}/"
    finally:
        ray.shutdown()  # the cluster is ours: Serve goes with it


@contextmanager
def running(application: Any) -> Iterator[None]:
    """The application, ready, at the route `/`; gone afterwards."""
    from ray import serve

    serve.run(application, name=APP, route_prefix="/")
    try:
        yield
    finally:
        serve.delete(APP)
