"""The systems that the demo compares, and the local Ray cluster on which they run."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_slo.core.processes import THREAD_VARIABLES
from ray_slo.serve.proxy import modes

APP = "demo"
# ray-slo gets this share of the client's SLO. The rest is for the transfer from and to the client.
SERVER_SHARE = 0.9


DEFAULT_WAIT_S = 0.01  # default wait of @serve.batch, seconds
WAY_HEADER = "x-demo-way"


@dataclass(frozen=True)
class Way:
    """A way of batching in plain Serve.

    Attributes:
        wait_s: wait of `@serve.batch`, in seconds.
        off_loop: whether the network runs in a thread. Otherwise it blocks the replica's event
            loop, and waiting requests form the next batch.
    """

    wait_s: float
    off_loop: bool = True

    @property
    def name(self) -> str:
        """Name of the way, in words."""
        default = "the default, " if self.wait_s == DEFAULT_WAIT_S else ""
        blocks = "" if self.off_loop else ", and a method that blocks"
        return f"a wait of {default}{1e3 * self.wait_s:.0f} ms{blocks}"

    @property
    def header(self) -> dict[str, str]:
        """Header of a request that sets this way in a tunable application."""
        return {WAY_HEADER: json.dumps({"batch_wait_s": self.wait_s, "off_loop": self.off_loop})}


@dataclass(frozen=True)
class Settings:
    """Settings of all systems, and the tuned way of batching.

    Attributes:
        networks: digits networks that `@ray_slo.deployment` may choose from, in order of cost. The
            other systems use the last one.
    """

    networks: tuple[str, ...]
    num_replicas: int
    max_batch_size: int
    slo_s: float
    way: Way
    profile_s: float = 4.0

    @property
    def variant(self) -> str:
        """Network of the systems that use only one."""
        return self.networks[-1]

    @property
    def server_slo_ms(self) -> float:
        """SLO that ray-slo gets, in milliseconds: the client's SLO minus a share for the transfer
        from and to the client."""
        return round(SERVER_SHARE * 1e3 * self.slo_s, 1)


@dataclass(frozen=True)
class System:
    """A system that serves digits. `app(settings)` returns a Serve application at the route `/`."""

    key: str
    name: str
    about: str
    app: Callable[[Settings], Any]
    ours: bool = False


def _served(cls: type, settings: Settings, **options: Any) -> Any:
    """Return a deployment of plain Serve."""
    from ray import serve

    return serve.deployment(
        cls,
        num_replicas=settings.num_replicas,
        max_ongoing_requests=10_000,  # the default of 5 would cap every batch at 5
        ray_actor_options={"num_cpus": 1},
        logging_config={"enable_access_log": False},  # as in a ray-slo application
        **options,
    )


def plain(settings: Settings, tunable: bool = False) -> Any:
    """Return an application of plain Serve with `@serve.batch`. A tunable one uses the way in each
    request's `Way.header`."""
    from ray_slo.demo.digits.plain import PlainDigits, TunableDigits

    way = {"batch_wait_s": settings.way.wait_s, "off_loop": settings.way.off_loop}
    served = _served(TunableDigits if tunable else PlainDigits, settings, user_config=way)
    return served.bind(settings.variant, max_batch_size=settings.max_batch_size)


def _batch(settings: Settings) -> Any:
    from ray_slo.demo.digits.batched import BatchedDigits

    return _served(BatchedDigits, settings).bind(
        settings.variant,
        latency_slo_ms=settings.server_slo_ms,
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
        plain,
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
    """Return the systems of these keys (default: all), in the order of `SYSTEMS`.

    Raises:
        ValueError: a key is unknown. The message has the valid ones.
    """
    valid = [system.key for system in SYSTEMS]
    if unknown := sorted(set(keys or ()) - set(valid)):
        raise ValueError(f"--system must be among {', '.join(valid)}; got {', '.join(unknown)}")
    return [system for system in SYSTEMS if not keys or system.key in keys]


def enter_fast_mode() -> str:
    """Choose Serve's fast mode if it is possible. Call this before Ray Serve is imported. Return
    the mode in words."""
    # By default, Serve takes a proxy for dead if it needs more than 5 s to start.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    return modes.enter()


@contextmanager
def local_serve() -> Iterator[str]:
    """Start a Ray cluster with Serve on the loopback interface. Yield the URL of its proxy."""
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))  # every replica inherits it
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    here = str(Path.cwd())  # deployments/ is in the working folder, not in the package
    paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    ray.init(
        address="local",
        num_cpus=8,  # slots for actors (replicas, frontend, proxy), not cores
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        (port,) = modes.free_ports(1)
        serve.start(
            http_options={"host": "127.0.0.1", "port": port},
            logging_config={"log_level": "WARNING"},
        )
        yield f"http://127.0.0.1:{port}/"
    finally:
        ray.shutdown()  # this process started the cluster, so Serve ends with it


@contextmanager
def running(application: Any) -> Iterator[None]:
    """Run an application at the route `/`. It is ready inside the context, and deleted at the
    end."""
    from ray import serve

    serve.run(application, name=APP, route_prefix="/")
    try:
        yield
    finally:
        serve.delete(APP)
