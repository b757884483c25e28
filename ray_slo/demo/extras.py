"""Features that plain Serve does not have: two models with different SLOs on the same replicas, and
replicas that follow the load. Each is a short run after the stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ray_slo.demo.client import Client
from ray_slo.demo.stream import GIVEN_UP_S, OverTime, Stretch, Sums, over_time, record, starts, sums
from ray_slo.demo.systems import APP, SERVER_SHARE, Settings, running
from ray_slo.load.drive import run_http_process
from ray_slo.load.report import LoadResult
from ray_slo.load.workload import Payloads

HASTY, CAREFUL = "hasty", "careful"
SHARES = {HASTY: 0.5, CAREFUL: 2.0}  # SLO of each model, as a multiple of the stream's SLO
LOADS = {HASTY: 0.6, CAREFUL: 0.4}  # rate of each, as a multiple of what tuned plain Serve holds
BOTH_S = 14.0
LOW, HIGH, LOW_AGAIN = "low", "high", "low again"
FOLLOWED = (Stretch(LOW, 7.0, 0.25), Stretch(HIGH, 20.0, 0.85), Stretch(LOW_AGAIN, 13.0, 0.25))
WARM_UP_S = 2.0


@dataclass(frozen=True)
class Model:
    """One of two models on the same replicas.

    Attributes:
        batch: mean size of the model's batches.
    """

    name: str
    network: str
    slo_s: float
    sums: Sums
    batch: float | None


def two_models(
    client: Client, url: str, payloads: Payloads, settings: Settings, held: float, seed: int
) -> list[Model]:
    """Serve a fast network with a short SLO and a slow one with a long SLO on the same replicas."""
    from ray_slo.serve import build_app

    networks = {HASTY: settings.networks[0], CAREFUL: settings.variant}
    slos_s = {name: share * settings.slo_s for name, share in SHARES.items()}
    app = build_app(
        {
            "models": {
                name: {
                    "callable": "ray_slo.demo.digits:Digits",
                    "kwargs": {"variant": network},
                    "latency_slo_ms": round(SERVER_SHARE * 1e3 * slos_s[name], 1),
                    "max_batch_size": settings.max_batch_size,
                }
                for name, network in networks.items()
            },
            "workers": {
                "cpu": {
                    "num_replicas": settings.num_replicas,
                    "ray_actor_options": {"num_cpus": 1},
                }
            },
            "profile_seconds": settings.profile_s,
        }
    )
    streams = {name: [Stretch(name, BOTH_S, LOADS[name])] for name in networks}
    with running(app):
        for name in networks:
            client.wait_until_answered(url + name, payloads)
        coming = {
            name: run_http_process(
                url + name,
                record(story, held, payloads, warm_up_s=WARM_UP_S, seed=seed + i),
                payloads,
                slo_s=slos_s[name],
                timeout_s=GIVEN_UP_S,
            )
            for i, (name, story) in enumerate(streams.items())
        }
        results = {name: future.result() for name, future in coming.items()}
    return [
        Model(
            name,
            networks[name],
            slos_s[name],
            sums(result, streams[name], {name: (name,)})[name],
            result.summary["mean_batch"],
        )
        for name, result in results.items()
    ]


@dataclass(frozen=True)
class Following:
    """Replicas that follow the load.

    Attributes:
        workers: pairs of a time in seconds since the end of the warm-up, and the number of workers
            that serve. In order of time.
        times: figures of each second.
        sums: figures of each stretch.
    """

    workers: Sequence[tuple[float, int]]
    times: OverTime
    sums: dict[str, Sums]

    def during(self, name: str) -> list[tuple[float, int]]:
        """Return `workers` during a stretch, with times from its start."""
        at = [stretch.name for stretch in FOLLOWED].index(name)
        begin, end = starts(FOLLOWED, 0.0)[at : at + 2]
        return [(t - begin, count) for t, count in self.workers if begin <= t < end]


def following(
    client: Client, url: str, payloads: Payloads, settings: Settings, held: float, seed: int
) -> Following:
    """Serve one network on one to `num_replicas` replicas, under a load that rises and falls."""
    import ray_slo
    from ray_slo.demo.digits import Digits

    app = ray_slo.deployment(
        Digits,
        name="digits",
        latency_slo_ms=settings.server_slo_ms,
        max_batch_size=settings.max_batch_size,
        profile_seconds=settings.profile_s,
        ray_actor_options={"num_cpus": 1},
        planner={"name": "auto", "interval_s": 2},
        autoscaling_config={
            "min_replicas": 1,
            "max_replicas": max(settings.num_replicas, 2),
            "downscale_delay_s": 4,
        },
    ).bind(settings.variant)
    workload = record(FOLLOWED, held, payloads, warm_up_s=WARM_UP_S, seed=seed)
    with running(app), counted() as seen:
        client.wait_until_answered(url, payloads)
        result, began_s = client.send(url, workload, payloads, settings.slo_s, GIVEN_UP_S)
    return followed(result, [(at - began_s - WARM_UP_S, count) for at, count in seen])


def followed(result: LoadResult, workers: Sequence[tuple[float, int]]) -> Following:
    """Return the figures of a run, with the numbers of workers that were counted meanwhile."""
    parts = {stretch.name: (stretch.name,) for stretch in FOLLOWED}
    end = sum(stretch.length_s for stretch in FOLLOWED)
    inside = [(at, count) for at, count in workers if 0 <= at < end]
    return Following(inside, over_time(result), sums(result, FOLLOWED, parts))


@contextmanager
def counted(period_s: float = 0.5) -> Iterator[list[tuple[float, int]]]:
    """Count the serving workers in a thread. Yield a list of pairs of a time on the monotonic clock
    and the number of workers; it grows while the context is open."""
    from ray import serve

    handle: Any = serve.get_app_handle(APP)
    seen: list[tuple[float, int]] = []
    over = threading.Event()

    def count() -> None:
        while not over.wait(period_s):
            with suppress(Exception):  # a missing reading is replaced by the next one
                plan = handle.slo_status.remote().result(timeout_s=5)["plan"]
                ready = sum(bool(worker["ready"]) for worker in plan.get("workers", {}).values())
                seen.append((time.monotonic(), ready))

    thread = threading.Thread(target=count, name="workers", daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
