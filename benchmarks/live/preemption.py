"""Live on Ray Serve: two streams on one worker, FLEX with and without preemption.

All times are ten times those of the paper. Stream A sends 1024 requests at once to a fast model
(ResNet18 in Table 4), 50 ms after the start and then every 1.2 s. Stream B sends a request every
10 ms to a slow model (ResNet269). One such request alone takes 786 ms, and the SLO is 900 ms.
Frontend, scheduler and worker are those of any application. Only the clients differ: the frontend's
process makes the requests itself (`Driver` of `live.grid`). On this machine, 1024 calls from
outside would take longer than the SLO.

* asleep: models that sleep ten times as long as Table 4 says. A batch has 50 steps with
  `ray_slo.checkpoint()` between them.
* torch: for B a ResNet of 269 layers, run several times per batch, so that a batch takes about
  786 ms. For A a ResNet of 18 layers on small pictures. Both use one CPU thread, and one pass has
  32 exit points. The worker measures a batch of one request of B at its start (95th percentile).
  All times are scaled so that this batch takes the paper's share of the SLO. They are scaled anew
  for each system, as the machine may be slower by then. *In time per burst* does not depend on it.

*The first burst* arrives in an idle system, when a request of B has run for 50 ms. The goodput is
that of one period. In *many bursts*, the state of the worker at a later burst depends on the burst
before. Without preemption, B starts when that burst's requests have expired. When it ends, little
time is left for the next burst; how much is chance. See `shepherd-fig11`, whose figures are in the
column *simulated* here.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness.rows import Row
from benchmarks.live.grid import driven
from benchmarks.shepherd.fig11 import BURST, PERIOD_S, TABLE_4_MS, run_streams
from benchmarks.shepherd.two_streams import streams
from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import save_profiles
from ray_slo.policies import make_policy

SOURCE = "SHEPHERD §7.2, Figure 11"
ASKED = [
    ("asleep, the first burst · flex, no preemption", "flex is better by", "≥", 3),
    (
        "asleep, many bursts · flex, no preemption",
        "flex is better by",
        "≥",
        3,
        "without preemption, a batch of 128 of each burst is in time too; simulated it is 2.6",
    ),
]
SCALE = 10.0
SLO_MS = 90.0
SLOW_MS = sum(TABLE_4_MS["RS269"])
MAX_BATCH = 128
EXIT_POINTS = 32
STEPS = 50  # parts of a batch that sleeps
POLICIES: dict[str, dict[str, Any]] = {
    "flex": {"margin_ms": 18.0},
    "flex, no preemption": {"margin_ms": 18.0, "preemption": False},
}
PAPER = 6.2


class Network:
    """A ResNet that runs `passes` times per batch, with the same picture in every item."""

    def __init__(self, depth: int, side: int, passes: int = 1) -> None:
        import torch

        from benchmarks.shepherd.networks import resnet

        torch.set_num_threads(1)
        self.network = resnet(depth)
        self._pictures = torch.randn(MAX_BATCH, 3, side, side)
        self._passes = passes

    @staticmethod
    def example_input() -> int:
        return 0

    def __call__(self, items: list[Any]) -> list[Any]:
        import torch

        with torch.inference_mode():
            for _ in range(self._passes):
                classes: list[Any] = self.network(self._pictures[: len(items)]).argmax(1).tolist()
        return classes


def run(quick: bool, seed: int) -> list[Row]:
    """Run both kinds of models. The streams are not random, so `seed` has no effect."""
    from ray_slo.demo.systems import local_serve

    rows: list[Row] = []
    with local_serve(), tempfile.TemporaryDirectory() as folder:
        rows += _compare("asleep", _asleep(Path(folder)), 3 if quick else 10, 4 if quick else 30)
        if not quick:
            rows += _compare("torch", _torch(), 6, 15)
    return rows


def _asleep(folder: Path) -> dict[str, dict[str, Any]]:
    models = {}
    for name, (alpha_ms, beta_ms) in TABLE_4_MS.items():
        seconds = (SCALE * alpha_ms / 1e3, SCALE * beta_ms / 1e3)
        file = folder / f"{name}.json"
        save_profiles(file, {name: LatencyProfile.linear(*seconds, MAX_BATCH)})
        models[name] = {
            "callable": "benchmarks.live.sleeper:Sleeper",
            "args": (*seconds, STEPS),
            "profile": str(file),
        }
    return models


def _torch() -> dict[str, dict[str, Any]]:
    from ray_slo.models.profiling import Target, profile_class

    target = Target("benchmarks.live.preemption:Network", args=(269, 224))
    times = sorted(profile_class(target, max_batch_size=1, budget_s=15.0)[1])
    passes = math.ceil(SCALE * SLOW_MS / 1e3 / times[len(times) // 2])
    networks = {"RN18": (18, 56), "RS269": (269, 224, passes)}
    return {
        name: {
            "callable": "benchmarks.live.preemption:Network",
            "args": args,
            "exit_points": EXIT_POINTS,
        }
        for name, args in networks.items()
    }


def _compare(
    bodies: str, models: dict[str, dict[str, Any]], bursts: int, periods: int
) -> list[Row]:
    from ray import serve

    from ray_slo.demo.systems import APP, running

    seen: dict[tuple[str, str], dict[tuple[str, str], int]] = {}
    preempted: dict[tuple[str, str], int] = {}
    delays_ms: dict[str, float] = {}
    scales: dict[str, float] = {}
    one, many = "the first burst", "many bursts"
    for policy, kwargs in POLICIES.items():
        with running(_application(models, kwargs)):
            handle = serve.get_app_handle(APP)
            learned = handle.slo_status.remote().result()["profiles"]
            scale = scales[policy] = learned["RS269@cpu"]["latency_1_ms"] / SLOW_MS
            for case, repeats, length in ((one, bursts, 1), (many, 1, periods)):
                total: Counter[tuple[str, str]] = Counter()
                for _ in range(repeats):
                    arrivals = streams(*models, length, scale)
                    slo = {"latency_slo_ms": scale * SLO_MS}
                    for a in handle.drive.remote(arrivals, **slo).result():
                        outcome = "good" if a.in_time else "late" if a.is_answered else "refused"
                        total[a.model, outcome] += 1
                status = handle.slo_status.remote().result()
                count = status["counts"]["preempted"] - sum(
                    n for (_, p), n in preempted.items() if p == policy
                )
                seen[case, policy], preempted[case, policy] = dict(total), count
            delays_ms[policy] = status["preempt_delay_ms"]
    rows = []
    for case, length in ((one, bursts), (many, periods)):
        good = {  # per burst
            policy: sum(n for (_, outcome), n in seen[case, policy].items() if outcome == "good")
            / length
            for policy in POLICIES
        }
        simulated = {policy: _simulated(kwargs, case == one) for policy, kwargs in POLICIES.items()}
        for policy in POLICIES:
            counts = seen[case, policy]
            late = sum(n for (_, outcome), n in counts.items() if outcome == "late")
            quick_share = counts.get(("RN18", "good"), 0) / (length * BURST)
            label = f"{bodies}, {case} · {policy}"
            scale = scales[policy]
            better = good["flex"] / good[policy] if good[policy] else math.nan
            paper = PAPER if policy != "flex" and case == one else None
            rows += [
                Row(label, "time ×", "", scale),
                Row(label, "SLO", "ms", scale * SLO_MS),
                Row(label, "goodput", "req/s", good[policy] / (scale * PERIOD_S)),
                Row(label, "in time per burst", "", good[policy]),
                Row(label, "flex is better by", "×", better, paper),
                Row(label, "simulated", "×", simulated["flex"] / simulated[policy]),
                Row(label, "A in time", "%", 100 * quick_share),
                Row(label, "late", "%", 100 * late / sum(counts.values())),
                Row(label, "preempted", "batches", preempted[case, policy]),
                Row(label, "preempted in", "ms", delays_ms[policy] if policy == "flex" else None),
            ]
    return rows


def _application(models: dict[str, dict[str, Any]], kwargs: dict[str, Any]) -> Any:
    bounds = {"RN18": MAX_BATCH, "RS269": 4}
    spec = {
        "models": {
            # The driver sets the SLO of each request, once B's time is known. The scheduler's SLO
            # must be close to it, or it would not try B again after B once looked too slow.
            name: {**model, "latency_slo_ms": 1.6 * SCALE * SLO_MS, "max_batch_size": bounds[name]}
            for name, model in models.items()
        },
        "workers": {"cpu": {"ray_actor_options": {"num_cpus": 1}}},
        "policy": {"name": "flex", "kwargs": kwargs},
        "scheduler": "embedded",
        "max_queued_requests": 1_000_000,
        "profile_seconds": 20.0,
    }
    return driven(spec)


def _simulated(kwargs: dict[str, Any], first: bool) -> float:
    periods, warmup = (1, 0) if first else (50, 2)
    policy = make_policy("flex", {**kwargs, "margin_ms": kwargs["margin_ms"] / SCALE})
    return run_streams(policy, SLO_MS, periods=periods, warmup=warmup).goodput
