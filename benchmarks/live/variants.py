"""Live on Ray Serve, real images: price, ramsis and each network alone, live and simulated.

The requests are digits of held-out writers as PNGs over HTTP, with Poisson arrivals. Noise is added
to the digits, so that the networks differ: without it, the three largest read all but 1 % rightly.
There are two workers with one core each. The same stream goes to `price` and `ramsis` with four
networks, and to each network alone (policy `deferred`). The loads are shares of what the best
network can serve here, according to the workers' measurement at the start. They are at most 100
requests/s. *In time*: answered within the client's SLO. The server is told nine tenths of it.

*Accuracy*: mean over the requests answered in time of the network's accuracy on all noisy images.
*Right*: share of those requests whose answer was right; it estimates the same with sampling noise.
*Predicted*: the simulator's figure for the same policy and the same arrival times. Its policy uses
the profiles that the scheduler had learned by the end of the run. Its workers use the execution
times of the run (mean and spread). Both use the measured dispatch delay.

digits-l is left out. It is as accurate as digits-xl in half the time. So there would be nothing to
choose at rates that the HTTP proxy of a laptop can handle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.harness.rows import Row
from benchmarks.live.load import by_http, learned
from ray_slo.core import Cluster, DispatchDelay, LatencyProfile, Model, Variant
from ray_slo.simulation import simulate
from ray_slo.simulation.arrivals import Times
from ray_slo.simulation.workloads import Workload

SOURCE = "ray-slo, RAMSIS §7"
NETWORKS = ("digits-xs", "digits-s", "digits-m", "digits-xl")
MODEL = "digits"
NOISE = 3.0  # standard deviation of the noise; ink goes from 0 to 16
SLO_S = 0.6
SERVER_SHARE = 0.9  # share of the SLO that the server is told; the rest is the way to the client
MARGIN_S = 0.005  # `response_margin_ms`
WORKERS = 2
LOADS = (0.35, 0.6, 1.0)  # shares of the best network's capacity
MAX_RATE = 100.0
WARMUP_S = 8.0


@dataclass
class Measured:
    """The outcome of one system under one load."""

    requests: pd.DataFrame  # those after the warm-up
    executed: pd.DataFrame  # (variant, batch_size, exec_s) of every answer
    told: dict[str, LatencyProfile]  # the policy's profiles at the end, by variant
    delay_s: float
    times_s: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty(0))

    @property
    def violations(self) -> float:
        """Percent of the requests not answered in time."""
        return 100 * float((self.requests["status"] != "ok").mean())

    @property
    def accuracy(self) -> float:
        """Mean accuracy of the variants that answered in time, percent."""
        return float(self.requests.loc[self.requests["status"] == "ok", "accuracy"].mean())

    @property
    def right(self) -> float:
        """Percent of the answers in time that are right."""
        in_time = self.requests[self.requests["status"] == "ok"]
        return 100 * float(in_time["correct"].astype(float).mean())


def run(quick: bool, seed: int) -> list[Row]:
    from ray import serve

    from ray_slo.demo.digits import DigitsFamily
    from ray_slo.demo.systems import APP, local_serve, running
    from ray_slo.load.workload import Payloads

    pictures, labels = noisy_pngs(120 if quick else None, seed)
    accuracies = measure_accuracies([DigitsFamily.preprocess(p) for p in pictures], labels)
    payloads = Payloads(pictures, [str(label) for label in labels], "image/png")
    warmup_s, measured_s = (5.0, 5.0) if quick else (WARMUP_S, 20.0)
    systems: dict[str, tuple[str, list[str]]] = {"price": ("price", list(NETWORKS))}
    if not quick:
        systems["ramsis"] = ("ramsis", list(NETWORKS))
    for name in ("digits-m",) if quick else reversed(NETWORKS[1:]):
        systems[name] = ("deferred", [name])
    runs: dict[tuple[float, str], Measured] = {}
    loads: list[float] = []
    with local_serve() as url:
        for system, (policy, names) in systems.items():
            chosen = {name: accuracies[name] for name in names}
            with running(application(policy, chosen, 4.0 if quick else 12.0)):
                handle = serve.get_app_handle(APP)
                if not loads:
                    profiles = learned(handle.slo_status.remote().result())
                    best = max(NETWORKS, key=accuracies.__getitem__)
                    capacity = WORKERS * throughput(profiles[best], SERVER_SHARE * SLO_S)
                    shares = LOADS[1:2] if quick else LOADS
                    loads = [min(round(share * capacity), MAX_RATE) for share in shares]
                for rate in dict.fromkeys(loads):
                    result = by_http(
                        url,
                        payloads,
                        rate,
                        duration_s=warmup_s + measured_s,
                        warmup_s=warmup_s,
                        seed=seed,
                        slo_s=SLO_S,
                    )
                    status = handle.slo_status.remote().result()
                    runs[rate, system] = Measured(
                        result.measured,
                        result.requests.loc[result.requests["status"].isin(("ok", "late"))],
                        learned(status),
                        1e-3 * status["dispatch_delay_ms"],
                        result.requests["intended_s"].to_numpy(),
                    )
    rows: list[Row] = []
    for rate in dict.fromkeys(loads):
        for system, (policy, names) in systems.items():
            seen = runs[rate, system]
            chosen = {name: accuracies[name] for name in names}
            expected = predict(policy, chosen, seen, warmup_s, warmup_s + measured_s)
            case = f"SLO {1e3 * SLO_S:g} ms, {rate:g} requests/s · {system}"
            rows += [
                Row(case, "accuracy of answers in time", "%", seen.accuracy),
                Row(case, "predicted accuracy", "%", expected[0]),
                Row(case, "not in time", "%", seen.violations),
                Row(case, "predicted not in time", "%", expected[1]),
                Row(case, "right", "%", seen.right),
            ]
    return rows


def noisy_pngs(count: int | None, seed: int) -> tuple[list[bytes], np.ndarray[Any, Any]]:
    """Return held-out digits with Gaussian noise as PNGs of 64 x 64 pixels, and their labels."""
    from ray_slo.demo.digits.data import INK, test_set, to_png

    images, labels = (part[:count] for part in test_set())
    rng = np.random.default_rng(seed)
    noisy = np.clip(images + rng.normal(0, NOISE, images.shape), 0, INK).astype(np.float32)
    return [to_png(image) for image in noisy], labels


def measure_accuracies(images: list[Any], labels: np.ndarray[Any, Any]) -> dict[str, float]:
    """Return the percentage of these images that each network reads rightly."""
    from ray_slo.demo.digits import DigitsFamily, load_variant

    reader = DigitsFamily()
    found = {}
    for name in NETWORKS:
        network = load_variant(name)
        answers = [
            a for i in range(0, len(images), 64) for a in reader(network, images[i : i + 64])
        ]
        right = [a["label"] == label for a, label in zip(answers, labels, strict=True)]
        found[name] = 100 * float(np.mean(right))
    return found


def application(policy: str, accuracies: dict[str, float], profile_seconds: float) -> Any:
    """Return the digits application with these networks as variants."""
    import ray_slo
    from ray_slo.demo.digits import DigitsFamily

    return ray_slo.deployment(
        DigitsFamily,
        name=MODEL,
        latency_slo_ms=1e3 * SERVER_SHARE * SLO_S,
        policy=policy,
        variants=[
            ray_slo.Variant(
                name, accuracy=accuracy, load="ray_slo.demo.digits:load_variant", args=(name,)
            )
            for name, accuracy in accuracies.items()
        ],
        num_replicas=WORKERS,
        max_batch_size=32,
        ray_actor_options={"num_cpus": 1},
        response_margin_ms=1e3 * MARGIN_S,
        profile_seconds=profile_seconds,
    ).bind()


def throughput(profile: LatencyProfile, slo_s: float) -> float:
    """Return the best requests per second of one worker with batches of at most half the SLO.

    The other half is time to wait.
    """
    largest = max(profile.max_batch_within(slo_s / 2), 1)
    return max(profile.throughput(b) for b in range(1, largest + 1))


def predict(
    policy: str,
    accuracies: dict[str, float],
    seen: Measured,
    warmup_s: float,
    duration_s: float,
) -> tuple[float, float]:
    """Simulate; return (accuracy of answers in time, requests not in time), both in percent."""
    actual, spread = execution(seen.executed, seen.told)
    delay = DispatchDelay(seen.delay_s)

    def cluster(profiles: dict[str, LatencyProfile]) -> Cluster:
        variants = tuple(
            Variant(name, {"default": profiles[name]}, accuracy)
            for name, accuracy in accuracies.items()
        )
        slo_s = SERVER_SHARE * SLO_S - MARGIN_S
        return Cluster.uniform([Model(MODEL, slo_s, variants)], WORKERS, delay=delay)

    report = simulate(
        policy,
        cluster(seen.told),
        Workload(arrivals=Times(times_s=seen.times_s.tolist())),
        truth=cluster(actual),
        duration_s=duration_s,
        warmup_s=warmup_s,
        latency_noise=spread,
        report_delay_s=seen.delay_s,
    )
    return report.accuracy or float("nan"), 100 * report.bad_rate()


def execution(
    executed: pd.DataFrame, told: dict[str, LatencyProfile]
) -> tuple[dict[str, LatencyProfile], float]:
    """Return the profiles that the execution times show, and the spread of these times.

    Each profile is the policy's, scaled by the median ratio of measured to expected time. A variant
    that did not run keeps the policy's profile. The spread is the standard deviation of the
    logarithm of that ratio.
    """
    ratios: list[np.ndarray[Any, Any]] = []
    actual = dict(told)
    for name, rows in executed.groupby("variant"):
        known = told[str(name)]
        sizes = rows["batch_size"].astype(int).to_numpy()
        # A batch of b requests has b rows, of which one is to count.
        one_each = _per_batch(sizes)
        sizes, seconds = sizes[one_each], rows["exec_s"].to_numpy()[one_each]
        believed = np.array([known.latency(int(b)) for b in sizes])
        share = seconds / believed
        actual[str(name)] = known.scaled(float(np.median(share)))
        ratios.append(np.log(share / np.median(share)))
    return actual, float(np.concatenate(ratios).std()) if ratios else 0.0


def _per_batch(sizes: Iterable[int]) -> list[int]:
    """Return the indices of one row per batch: every b-th of the rows with batch size b."""
    counts: dict[int, int] = {}
    picked = []
    for i, size in enumerate(sizes):
        counts[size] = counts.get(size, 0) + 1
        if counts[size] % size == 0:
            picked.append(i)
    return picked
