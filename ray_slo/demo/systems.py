"""The systems that the demo compares, and the local Ray they run on."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_slo.models.profiling import THREAD_VARIABLES
from ray_slo.serve.proxy import modes

APP = "demo"
SERVER_SHARE = 0.9  # of the SLO, told to ray-slo; the rest is for the way from client and to it


DEFAULT_WAIT_S = 0.01  # of @serve.batch
WAY_HEADER = "x-demo-way"


@dataclass(frozen=True)
class Way:
    """How plain Serve batches.

    Attributes:
        wait_s: of `@serve.batch`.
        off_loop: the network runs in a thread; else it blocks the replica's event loop, where
            requests then pile up to batches.
    """

    wait_s: float
    off_loop: bool = True

    @property
    def name(self) -> str:
        """In words."""
        default = "the default, " if self.wait_s == DEFAULT_WAIT_S else ""
        blocks = "" if self.off_loop else ", and a method that blocks"
        return f"a wait of {default}{1e3 * self.wait_s:.0f} ms{blocks}"

    @property
    def header(self) -> dict[str, str]:
        """The header with which a request asks a tunable application for this way."""
        return {WAY_HEADER: json.dumps({"batch_wait_s": self.wait_s, "off_loop": self.off_loop})}


@dataclass(frozen=True)
class Settings:
    """What is equal for all systems, and the one way to batch that was tuned.

    Attributes:
        networks: the digits networks that `@ray_slo.deployment` may choose from, by cost. The other
            systems have the last one.
    """

    networks: tuple[str, ...]
    num_replicas: int
    max_batch_size: int
    slo_s: float
    way: Way
    profile_s: float = 4.0

    @property
    def variant(self) -> str:
        """The network of systems that have only one."""
        return self.networks[-1]

    @property
    def server_slo_ms(self) -> float:
        """What ray-slo is told: the client's SLO less a share for the way from and to it."""
        return round(SERVER_SHARE * 1e3 * self.slo_s, 1)


@dataclass(frozen=True)
class System:
    """A way to serve digits: `app(settings)` is a Serve application at the route `/`."""

    key: str
    name: str
    about: str
    app: Callable[[Settings], Any]
    ours: bool = False


def plain(settings: Settings, way: Way, tunable: bool = False) -> Any:
    """Plain Serve with `@serve.batch`; if it is tunable, it also obeys `Way.header`."""
    from ray_slo.demo.digits import plain as module

    return module.app(
        settings.variant,
        num_replicas=settings.num_replicas,
        batch_wait_s=way.wait_s,
        max_batch_size=settings.max_batch_size,
        off_loop=way.off_loop,
        tunable=tunable,
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
    from ray_slo.demo.digits import DigitsFamily, variants

    deployment = ray_slo.deployment(
        DigitsFamily,
        name="digits",
        latency_slo_ms=settings.server_slo_ms,
        num_replicas=settings.num_replicas,
        max_batch_size=settings.max_batch_size,
        variants=variants(*settings.networks),
        profile_seconds=settings.profile_s,
        ray_actor_options={"num_cpus": 1},
    )
    return deployment.bind()


SYSTEMS = (
    System(
        "tuned",
        "@serve.batch, tuned",
        "the way to batch that held the highest rate of those tried; one network",
        lambda s: plain(s, s.way),
    ),
    System(
        "batch",
        "@ray_slo.batch",
        "the decorator exchanged, and an SLO given; the same network",
        _batch,
        True,
    ),
    System(
        "deployment",
        "@ray_slo.deployment",
        "one queue for all replicas, an SLO and the smaller networks given, too",
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
    """A free port. It is outside the ranges from which the system, Ray and Serve take ports, so
    that no other process gets it before it is used."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def enter_fast_mode() -> str:
    """Choose Serve's fast mode where it is possible, before anything imports Ray Serve.

    HAProxy's own pages get free ports, so that another HAProxy on this machine does not matter.

    Returns:
        The mode, in words.
    """
    # After 5 s, Serve would take a proxy for dead that is only slow to start.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    for name in ("RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT"):
        os.environ.setdefault(name, str(free_port()))
    return modes.enter()


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
