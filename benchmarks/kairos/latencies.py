"""Measures the latency of real networks by the size of a request, with one and two threads.

Each number of threads has a process of its own, with as many cores. The two take turns, so that
other work on the machine disturbs both alike. The time of a run is the CPU time of its busiest
thread. Threads that wait for one another sleep (`OMP_WAIT_POLICY`), so they use none. This leaves
out the time that other programs take from the threads, and the time until a thread wakes up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.harness.data import Missing

LARGEST = {"NCF": 1000, "Wide & Deep": 1000, "BERT-tiny": 250}
"""Largest request of each network, in items to rank. A text has `TOKENS` tokens."""
TOKENS = 16
SHARES = (0.001, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0)
"""Measured sizes, as shares of the largest."""
THREADS = (1, 2)
RUNS = 3  # of which the quickest is a sample


@dataclass(frozen=True)
class Samples:
    """Samples of one network, number of threads and size: each is the least of `RUNS` runs.

    Attributes:
        busiest_s: CPU seconds of the busiest thread.
        wall_s: elapsed seconds.
    """

    busiest_s: list[float]
    wall_s: list[float]

    def ms(self, quantile: float) -> float:
        return 1e3 * float(np.quantile(self.busiest_s, quantile))


def sizes(network: str) -> list[int]:
    return [max(1, round(share * LARGEST[network])) for share in SHARES]


def measure(networks: Sequence[str], rounds: int) -> dict[tuple[str, int, int], Samples]:
    """Return the samples by (network, threads, size); each has one per round.

    Raises:
        Missing: torch or transformers is not installed, or there are too few cores.
    """
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise Missing(f"{package} is not installed")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < max(THREADS):
        raise Missing(f"{max(THREADS)} threads need as many cores, there are {len(cores)}")
    found: dict[tuple[str, int, int], Samples] = {}
    with ExitStack() as stack:
        processes = {
            n: stack.enter_context(
                ProcessPoolExecutor(1, get_context("spawn"), _start, (cores[:n],))
            )
            for n in THREADS
        }
        for _ in range(rounds):
            for network in networks:
                for size in sizes(network):
                    for threads, process in processes.items():
                        busiest, wall = process.submit(_sample, network, size).result()
                        of = found.setdefault((network, threads, size), Samples([], []))
                        of.busiest_s.append(busiest)
                        of.wall_s.append(wall)
    return found


def _start(cores: list[int]) -> None:
    """Give this process its cores and threads. Its children's threads inherit both."""
    os.sched_setaffinity(0, cores)
    os.environ["OMP_WAIT_POLICY"] = "passive"
    import torch

    torch.set_num_threads(len(cores))


def _sample(network: str, size: int) -> tuple[float, float]:
    """Return the least CPU time of the busiest thread, and the least elapsed time, in seconds."""
    run = _run(network, size)
    times = [timed(run) for _ in range(RUNS)]
    return min(busiest for busiest, _ in times), min(wall for _, wall in times)


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Return the CPU time of the busiest of one or two threads, and the elapsed time, in seconds.

    One of the threads is this one.
    """
    wall, mine, all_threads = time.perf_counter(), time.thread_time(), time.process_time()
    run()
    mine, all_threads = time.thread_time() - mine, time.process_time() - all_threads
    return max(mine, all_threads - mine), time.perf_counter() - wall


@cache
def _run(network: str, size: int) -> Callable[[], Any]:
    """Return a function that serves a request of this size, after it has done so once."""
    import torch

    rng = torch.Generator().manual_seed(size)
    module = _network(network)
    if network == "BERT-tiny":
        tokens = torch.randint(5, 1000, (size, TOKENS), generator=rng)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    else:
        from deployments.recommender.data import ITEMS

        items = torch.randint(0, ITEMS, (size,), generator=rng)
        inputs = {"user": torch.full((size,), 7), "item": items}

    def run() -> Any:
        with torch.inference_mode():
            return module(**inputs)

    run()
    return run


@cache
def _network(name: str) -> Any:
    """Return a network with random weights."""
    if name == "BERT-tiny":
        from ray_slo.models import text

        return text.load("bert-tiny", weights="none", device="cpu").network
    from deployments.recommender.networks import NETWORKS

    return NETWORKS[{"NCF": "ncf", "Wide & Deep": "wide_deep"}[name]]().eval()
