"""Part `profiles`: the best way to run each network, its ℓ(b), and the gain from staging ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.gpu.setting import Network, Setting, Stopwatch
from benchmarks.harness.data import Missing
from benchmarks.harness.rows import Row
from ray_slo.core.profiles import LatencyProfile, doubling_sizes
from ray_slo.models.memory import let_go
from ray_slo.models.running import Runner
from ray_slo.models.ways import Tried

_LEAST, _MOST = 5, 200  # number of batches to time


def rows(setting: Setting) -> Iterator[Row]:
    makers: list[Callable[[], Network]] = [
        lambda: setting.resnet(50),
        setting.efficientnet,
        setting.bert,
    ]
    each_s = setting.seconds / len(makers)
    for make in makers:
        begin = time.monotonic()
        try:
            network = make()
            choice = setting.chosen(network)
        except Missing as error:
            yield Row(f"left out: {error}", "networks measured", "", 0)
            continue
        for tried in choice.tried:
            yield from _way(network.name, tried)
        left_s = each_s - (time.monotonic() - begin)
        yield from _profile(setting, network, network.runner(setting.device), 0.3 * left_s)
        yield from _profile(setting, network, choice.runner, 0.4 * left_s)
        yield from _ahead(setting, network, choice.runner, 0.2 * left_s)
        del choice
        let_go()


def _way(name: str, tried: Tried) -> Iterator[Row]:
    case = f"{name}, ways to run it · {tried.how}"
    if tried.failed is not None:
        yield Row(f"{case}: {tried.failed}"[:200], "possible", "", 0)
        return
    for size, seconds in tried.seconds.items():
        yield Row(case, f"batch of {size}", "ms", 1e3 * seconds)
    yield Row(case, "off", "% of the largest output", 100 * tried.off)


def _profile(setting: Setting, network: Network, runner: Runner, budget_s: float) -> Iterator[Row]:
    stopwatch = Stopwatch(runner)
    sizes = doubling_sizes(network.max_batch)
    medians: dict[int, float] = {}
    how = f"{network.name} on {setting.name} · {runner.how}"
    for size in sizes:
        staged = network.stage(runner, size)
        for _ in range(2):  # warm-up: chooses kernels, allocates memory
            stopwatch(staged)
        times: list[tuple[float, float]] = []
        until = time.monotonic() + budget_s / len(sizes)
        while len(times) < _LEAST or (time.monotonic() < until and len(times) < _MOST):
            times.append(stopwatch(staged))
        device_s, host_s = np.array(times).T
        medians[size] = float(np.median(device_s))
        case = f"{how}, batch of {size}"
        yield Row(case, "on the device p50", "ms", 1e3 * medians[size])
        yield Row(case, "p95", "ms", 1e3 * float(np.quantile(device_s, 0.95)))
        yield Row(case, "as its caller sees it p50", "ms", 1e3 * float(np.median(host_s)))
        yield Row(case, "throughput", "items/s", size / medians[size])
    alpha_s, beta_s = LatencyProfile.from_points(medians).fit_linear()
    yield Row(how, "α", "ms", 1e3 * alpha_s)
    yield Row(how, "β", "ms", 1e3 * beta_s)


def _ahead(setting: Setting, network: Network, runner: Runner, budget_s: float) -> Iterator[Row]:
    """Run equal batches; each is staged after the previous one, or while that one runs."""
    size = min(32, network.max_batch)
    case = f"{network.name}, batches of {size}, {runner.how}"
    found: dict[str, float] = {}
    with ThreadPoolExecutor(1) as stager:
        for name, ahead in (("in turn", False), ("ahead", True)):
            ran, begin = 0, time.monotonic()
            staged = network.stage(runner, size)
            while ran < _LEAST or time.monotonic() - begin < budget_s / 2:
                if ahead:
                    coming = stager.submit(network.stage, runner, size)
                    runner(staged)
                    staged = coming.result()
                else:
                    runner(staged)
                    staged = network.stage(runner, size)
                ran += 1
            found[name] = size * ran / (time.monotonic() - begin)
    yield Row(case, "staged in turn", "items/s", found["in turn"])
    yield Row(case, "staged ahead", "items/s", found["ahead"])
    yield Row(case, "gain", "×", found["ahead"] / found["in turn"])
