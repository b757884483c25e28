"""Parts `exit points` (SHEPHERD Table 4, Figure 12) and `two streams` (§7.2)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.setting import Network, Setting
from benchmarks.harness.data import Missing
from benchmarks.harness.rows import Row
from benchmarks.shepherd.fig12 import profile_rows
from benchmarks.shepherd.two_streams import Result, serve, streams
from benchmarks.zoos import load
from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import doubling_sizes
from ray_slo.models.memory import let_go
from ray_slo.models.preemption import Preemptible
from ray_slo.models.preemption_profile import PreemptionProfile, profile_preemption
from ray_slo.models.profiling import profile_callable, to_profile
from ray_slo.models.running import Runner, Staged
from ray_slo.policies import make_policy

CANDIDATES = (0, 8, 16, 32, 48, 64, 96)
LIMIT = 0.03
"""Limit of the preemption delay and of the exit points' slowdown, as a share of a batch's time."""
SLOW_MS = 78.57  # batch of one of ResNet269 in Table 4
_PAPER = {"BERT-base": "BERT"}


def exit_points(setting: Setting) -> Iterator[Row]:
    paper = load("shepherd_v100")
    makers: list[Callable[[], Network]] = [
        lambda: setting.resnet(50),
        setting.bert,
        lambda: setting.resnet(18),
    ]
    each_s = setting.seconds / len(makers)
    for make in makers:
        try:
            network = make()
            runner = network.runner(setting.device)
        except Missing as error:
            yield Row(f"left out: {error}", "networks measured", "", 0)
            continue
        sizes = (1, 4) if setting.tiny else (1, 8, 32)
        profile = _preemption(setting, network, runner, sizes, 0.7 * each_s)
        alpha_s, beta_s = _latency(network, runner, 0.2 * each_s).fit_linear()
        chosen = [p for p in profile.points if p.exit_points == profile.chosen]
        case = f"exit points on {setting.name} · {network.name}"
        known = paper.get(_PAPER.get(network.name, network.name))
        yield Row(case, "α", "ms", 1e3 * alpha_s, known and known.alpha_ms)
        yield Row(case, "β", "ms", 1e3 * beta_s, known and known.beta_ms)
        yield Row(case, "exit points", "", profile.chosen, known and known.exit_points)
        yield Row(case, "delay p95", "%", 100 * max(p.delay for p in chosen))
        yield Row(case, "slowdown", "%", 100 * max(p.slowdown for p in chosen))
        yield from profile_rows(network.name, profile)
        del runner
        let_go()


def _preemption(
    setting: Setting, network: Network, runner: Runner, sizes: tuple[int, ...], budget_s: float
) -> PreemptionProfile:
    staged = {size: network.stage(runner, size) for size in sizes}
    of_batch = {size: batch.inputs for size, batch in staged.items()}
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    return profile_preemption(
        runner.network,
        of_batch.__getitem__,
        sizes,
        (0, 2) if setting.tiny else CANDIDATES,
        run=lambda inputs: network.call(runner.network, inputs),
        budget_s=budget_s,
        max_delay=LIMIT,
        max_slowdown=LIMIT,
        seed=setting.seed,
    )


def _latency(network: Network, runner: Runner, budget_s: float) -> LatencyProfile:
    """Return median latencies as the caller of a runner sees them, with batches staged before."""
    staged = {size: network.stage(runner, size) for size in doubling_sizes(network.max_batch)}
    samples = profile_callable(
        lambda items: runner(staged[len(items)]), None, staged, budget_s=budget_s
    )
    return to_profile(samples, quantile=0.5, max_batch_size=network.max_batch)


def two_streams(setting: Setting) -> Iterator[Row]:
    """Run FLEX with and without preemption on §7.2's two streams, in one process on one device.

    Times are scaled so that a batch of one of the slow network takes the paper's 79 ms. Printed
    rates are scaled back. The paper's 6.2 is that of the first burst.
    """
    begin = time.monotonic()
    profiles: dict[str, LatencyProfile] = {}
    runs: dict[str, Callable[[int], object]] = {}
    delay_s = 0.0
    for depth in (18, 269):
        network = setting.resnet(depth)
        runner = network.runner(setting.device)
        preemption = _preemption(setting, network, runner, (1,), 0.15 * setting.seconds)
        Preemptible(runner.network, preemption.exit_points)  # stays on the network
        profiles[network.name] = _latency(network, runner, 0.1 * setting.seconds).scaled(1.05)
        runs[network.name] = _runner(network, runner)
        chosen = [p for p in preemption.points if p.exit_points == preemption.chosen]
        delay_s = max(delay_s, *(p.delay_p95_s for p in chosen))
    quick, slow = profiles
    scale = profiles[slow].latency(1) / (SLOW_MS / 1e3)
    for label, share in (("the first burst", 0.0), ("many bursts", 0.2)):
        for slo_ms in (250.0, 90.0):
            left_s = max(setting.seconds - (time.monotonic() - begin), 0.0)
            periods = max(1, int(share * left_s / (0.120 * scale))) if share else 1
            results: dict[str, Result] = {}
            for policy, preempts in (("flex", True), ("flex, no preemption", False)):
                kwargs: dict[str, Any] = {"preemption": preempts, "preempt_delay_ms": 1e3 * delay_s}
                serving = serve(
                    make_policy("flex", kwargs),
                    profiles,
                    runs,
                    streams(quick, slow, min(periods, 100), scale),
                    scale * slo_ms / 1e3,
                )
                results[policy] = asyncio.run(serving)
            for policy, result in results.items():
                case = f"two streams, SLO {slo_ms:g} ms, {label} · {policy}"
                better = results["flex"].goodput / max(result.goodput, 1e-9)
                is_paper = policy != "flex" and label == "the first burst"
                paper = {250.0: 1.0, 90.0: 6.2}[slo_ms] if is_paper else None
                yield Row(case, "goodput", "req/s", scale * result.goodput)
                yield Row(case, "flex is better by", "×", better, paper)
                yield Row(case, "preempted", "batches", len(result.delays_s))


def _runner(network: Network, runner: Runner) -> Callable[[int], object]:
    largest = network.stage(runner, network.max_batch)

    def run(size: int) -> object:
        return runner(Staged(largest.inputs[:size], largest.ready), lambda scores: scores.argmax(1))

    return run
