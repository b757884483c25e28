"""Parts `serving`, `variants` and `one process`.

`serving` compares ours with plain Serve with a tuned wait. `variants` has three networks under
`auto`. Both use HTTP on Ray Serve. `one process` runs the policies alone on the device, without
Ray.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.gpu.setting import Network, Setting, Stopwatch
from benchmarks.harness.rows import Row
from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import doubling_sizes
from ray_slo.models.memory import let_go
from ray_slo.models.running import How, Runner, Staged

DEPTH = 50
VARIANTS = {18: 69.76, 50: 76.13, 152: 78.31}
"""ResNets, and the accuracy that torchvision publishes for each (ImageNet-1K, top 1, V1)."""
LOADS = (0.5, 0.8, 1.0, 1.2)
"""Loads, as shares of the throughput of one worker in batches of `FULL`."""
FULL = 16
BATCH_S = 0.1  # time that a batch of `FULL` should take; Serve's proxy can keep up with that
SLO_BATCHES = 4.0  # the SLO, in batches of `FULL`
WAITS = (0.1, 0.5, 1.0)  # waits that are tried for plain Serve, in batches of `FULL`


def serving(setting: Setting) -> Iterator[Row]:
    begin = time.monotonic()
    how, passes, profile = _measured(setting, DEPTH)
    full = _full(profile)
    capacity, slo_s = full / profile.latency(full), SLO_BATCHES * profile.latency(full)
    title = f"serving, ResNet{DEPTH} × {passes}, {how}, SLO {1e3 * slo_s:.0f} ms"
    with setting.serve() as url:
        from benchmarks.gpu import served

        largest = served.largest_batch(setting.resnet(DEPTH))
        # 20 s are for the start of two applications.
        left_s = setting.seconds - (time.monotonic() - begin) - 20.0
        each_s = max(left_s / (len(WAITS) + 2 * len(LOADS)), 1.0)

        def load(rate: float) -> dict[str, float]:
            return _load(url, rate, each_s, setting.seed, slo_s)

        best: dict[str, float] = {}
        for name, waits in (("@serve.batch, tuned wait", WAITS), ("ray-slo", (0.0,))):
            application = _plain if waits is WAITS else _ours

            def app(wait: float, application: Callable[..., Any] = application) -> Any:
                return application(setting, how, passes, largest, slo_s, wait * full / capacity)

            with _running(app(waits[0])):
                wait = waits[0]
                if len(waits) > 1:
                    tried = {}
                    for one in waits:
                        _again(app(one))
                        tried[one] = load(0.8 * capacity)["in time"]
                        case = f"{title} · wait {1e3 * one * full / capacity:.0f} ms"
                        yield Row(case, "in time at 0.8", "req/s", tried[one])
                    wait = max(tried, key=lambda w: tried[w])
                    _again(app(wait))
                for share in LOADS:
                    found = load(share * capacity)
                    best[name] = max(best.get(name, 0.0), found["in time"])
                    case = f"{title}, {share:g} of {capacity:.0f}/s · {name}"
                    yield from _figures(case, found)
    ours, plain = best["ray-slo"], best["@serve.batch, tuned wait"]
    yield Row(f"{title} · ray-slo", "best goodput", "req/s", ours)
    yield Row(f"{title} · ray-slo", "over the tuned wait", "×", ours / max(plain, 1e-9))


def variants(setting: Setting) -> Iterator[Row]:
    begin = time.monotonic()
    how, passes, profile = _measured(setting, DEPTH)
    full = _full(profile)
    capacity, slo_s = full / profile.latency(full), SLO_BATCHES * profile.latency(full)
    title = f"variants under auto, SLO {1e3 * slo_s:.0f} ms"
    with setting.serve() as url:
        import ray_slo
        from benchmarks.gpu import served

        variants = [
            ray_slo.Variant(
                f"ResNet{depth}",
                accuracy=accuracy,
                load="benchmarks.gpu.served:Pictures",
                args=(setting, depth, how, passes),
            )
            for depth, accuracy in VARIANTS.items()
        ]
        application = ray_slo.deployment(
            served.Variants,
            name="pictures",
            latency_slo_ms=900 * slo_s,
            variants=variants,
            max_batch_size=served.largest_batch(setting.resnet(DEPTH)),
            ray_actor_options=setting.actor,
            profile_seconds=0.5 if setting.tiny else 3.0,
        ).bind()
        with _running(application):
            left_s = setting.seconds - (time.monotonic() - begin)
            for share in LOADS:
                found = _load(
                    url, share * capacity, max(left_s / len(LOADS), 1.0), setting.seed, slo_s
                )
                case = f"{title} · {share:g} of what ResNet{DEPTH} does, {capacity:.0f}/s"
                yield from _figures(case, found)
                yield Row(case, "accuracy", "%", found["accuracy"])


def one_process(setting: Setting) -> Iterator[Row]:
    """Compare `timeout` with its best wait with `auto`: one queue, one device, one clock."""
    from benchmarks.shepherd.two_streams import serve
    from ray_slo.policies import make_policy
    from ray_slo.simulation.arrivals import Poisson

    begin = time.monotonic()
    network = setting.resnet(DEPTH)
    how, passes, profile = _measured(setting, DEPTH)
    runner = network.runner(setting.device, how)
    runner.prepare(lambda size: network.stage(runner, size))
    largest = network.stage(runner, network.max_batch)
    full = _full(profile)
    capacity, slo_s = full / profile.latency(full), SLO_BATCHES * profile.latency(full)
    title = f"one process, ResNet{DEPTH} × {passes}, {how}, SLO {1e3 * slo_s:.0f} ms"
    each_s = (setting.seconds - (time.monotonic() - begin)) / (len(WAITS) + 2 * len(LOADS))

    def batch(size: int) -> None:
        for _ in range(passes):
            runner(Staged(largest.inputs[:size], largest.ready))

    def goodput(policy: str, kwargs: dict[str, Any], rate: float) -> float:
        times = Poisson(rate=rate).times(
            max(each_s, 2 * slo_s), np.random.default_rng(setting.seed)
        )
        serving = serve(
            make_policy(policy, kwargs),
            {network.name: profile.scaled(1.1)},  # as half of the batches are above the median
            {network.name: batch},
            {network.name: times.tolist()},
            slo_s,
        )
        return asyncio.run(serving).goodput

    waits = {share: 1e3 * share * profile.latency(full) for share in WAITS}
    tried = {}
    for ms in waits.values():
        tried[ms] = goodput("timeout", {"timeout_ms": ms}, 0.8 * capacity)
        yield Row(f"{title} · wait {ms:.2g} ms", "in time at 0.8", "req/s", tried[ms])
    wait_ms = max(tried, key=lambda ms: tried[ms])
    best: dict[str, float] = {}
    for share in LOADS:
        for name, policy, kwargs in (
            ("timeout, tuned", "timeout", {"timeout_ms": wait_ms}),
            ("auto", "auto", {}),
        ):
            found = goodput(policy, kwargs, share * capacity)
            best[name] = max(best.get(name, 0.0), found)
            case = f"{title}, {share:g} of {capacity:.0f}/s · {name}"
            yield Row(case, "in time", "req/s", found)
    over = best["auto"] / max(best["timeout, tuned"], 1e-9)
    yield Row(f"{title} · auto", "over the tuned wait", "×", over)


def _measured(setting: Setting, depth: int) -> tuple[How, int, LatencyProfile]:
    """Return the best way to run a ResNet, its number of passes in a batch, and its ℓ(b)."""
    network = setting.resnet(depth)
    runner = setting.chosen(network).runner
    seconds = {size: _seconds(network, runner, size) for size in doubling_sizes(network.max_batch)}
    passes = math.ceil(BATCH_S / seconds[min(FULL, network.max_batch)])
    how = runner.how
    del runner
    let_go()  # frees the device for a worker
    return how, passes, LatencyProfile.from_points({b: passes * s for b, s in seconds.items()})


def _seconds(network: Network, runner: Runner, size: int) -> float:
    staged = network.stage(runner, size)
    stopwatch = Stopwatch(runner)
    return float(np.median([stopwatch(staged)[1] for _ in range(7)][2:]))


def _full(profile: LatencyProfile) -> int:
    return min(FULL, profile.max_batch_size)


def _plain(
    setting: Setting, how: How, passes: int, largest: int, slo_s: float, wait_s: float
) -> Any:
    from ray import serve

    from benchmarks.gpu.served import Plain

    return serve.deployment(
        Plain,
        name="Plain",
        max_ongoing_requests=10_000,  # the default of 5 would cap every batch at 5
        ray_actor_options=setting.actor,
        logging_config={"enable_access_log": False},  # as in a ray-slo application
        user_config={"wait_s": wait_s},
    ).bind(setting, DEPTH, how, passes, largest)


def _ours(
    setting: Setting, how: How, passes: int, largest: int, slo_s: float, wait_s: float
) -> Any:
    import ray_slo
    from benchmarks.gpu.served import Ours

    return ray_slo.deployment(
        Ours,
        name="ours",
        latency_slo_ms=900 * slo_s,  # the rest is the way from and to the client
        max_batch_size=largest,
        ray_actor_options=setting.actor,
        profile_seconds=0.5 if setting.tiny else 3.0,
    ).bind(setting, DEPTH, how, passes)


def _running(application: Any) -> Any:
    from ray_slo.demo.systems import running

    return running(application)


def _again(application: Any) -> None:
    """Deploy again with another wait; Serve then reconfigures the running replica."""
    from ray import serve

    from ray_slo.demo.systems import APP

    serve.run(application, name=APP, route_prefix="/")


def _load(url: str, rate: float, seconds: float, seed: int, slo_s: float) -> dict[str, float]:
    from benchmarks.live.load import by_http
    from ray_slo.load.workload import Payloads

    payloads = Payloads([str(i).encode() for i in range(FULL)], None, "application/json")
    warmup_s = 0.25 * seconds
    result = by_http(
        *(url, payloads, rate),
        duration_s=seconds,
        warmup_s=warmup_s,
        seed=seed,
        slo_s=slo_s,
        timeout_s=slo_s + 10,
    )
    seen = result.measured
    in_time = seen[seen["status"] == "ok"]
    answered = seen[seen["status"].isin(("ok", "late"))]["latency_s"]
    return {
        "offered": len(seen) / (seconds - warmup_s),
        "in time": len(in_time) / (seconds - warmup_s),
        "bad": 100 * (1 - len(in_time) / max(len(seen), 1)),
        "p99": 1e3 * float(answered.quantile(0.99)) if len(answered) else math.nan,
        "accuracy": float(in_time["accuracy"].mean()) if "accuracy" in in_time else math.nan,
    }


def _figures(case: str, found: dict[str, float]) -> Iterator[Row]:
    yield Row(case, "offered", "req/s", found["offered"])
    yield Row(case, "in time", "req/s", found["in time"])
    yield Row(case, "not in time", "%", found["bad"])
    yield Row(case, "p99", "ms", found["p99"])
