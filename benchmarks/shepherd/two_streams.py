"""SHEPHERD §7.2's two streams for real, in one process: a policy, one worker thread, one clock.

There is no Ray and no network. `PolicyHost` runs the policy on an event loop, batches run in a
thread, and a preemption sets the flag of the batch. So only the policy and the preemption are
measured.

Stream A has bursts of 1024 requests every 120 ms for a fast model. Stream B has a request every
millisecond for a slow one. Times and SLOs are multiplied by `scale`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count

from benchmarks.live.load import bunches
from ray_slo.core import (
    BatchOutcome,
    BatchStatus,
    Cluster,
    Dispatch,
    Drop,
    LatencyProfile,
    Model,
    Policy,
    Preempt,
    Request,
    Variant,
)
from ray_slo.load.drive import paced
from ray_slo.models.checkpoint import Preempted, PreemptionFlag, preemption_scope
from ray_slo.serve.scheduler.host import PolicyHost

PERIOD_S, FIRST_S, BURST, EVERY_S = 0.120, 0.005, 1024, 0.001


def streams(quick: str, slow: str, periods: int, scale: float) -> dict[str, list[float]]:
    """Return the arrival times of both streams in seconds, by model."""
    bursts = [scale * (FIRST_S + PERIOD_S * i) for i in range(periods)]
    singles = range(round(periods * PERIOD_S / EVERY_S))
    return {
        quick: [at for at in bursts for _ in range(BURST)],
        slow: [scale * EVERY_S * i for i in singles],
    }


@dataclass
class Result:
    """What became of the requests.

    Attributes:
        good: number of requests answered in time, by model.
        outcomes: (request id, outcome) in the order of their ends: "good", "late" or "dropped".
        delays_s: time from each successful preemption until the worker was free.
    """

    duration_s: float
    good: dict[str, int] = field(default_factory=dict)
    outcomes: list[tuple[int, str]] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)
    too_late: int = 0  # preemptions that came too late: the batch ended normally

    @property
    def goodput(self) -> float:
        """Requests answered in time, per second."""
        return sum(self.good.values()) / self.duration_s


async def serve(
    policy: Policy,
    profiles: Mapping[str, LatencyProfile],
    run: Mapping[str, Callable[[int], object]],
    arrivals: Mapping[str, list[float]],
    slo_s: float,
) -> Result:
    """Serve all arrivals with one worker, until the last one is answered.

    Args:
        run: by model, a function that runs a batch of a given size, with checkpoints. It is called
            in one thread.
    """
    loop = asyncio.get_running_loop()
    models = [Model(n, slo_s, (Variant(n, {"default": p}),)) for n, p in profiles.items()]
    cluster = Cluster.uniform(models, 1)
    worker = next(iter(cluster.workers))
    due = bunches(arrivals)
    number = sum(len(times) for times in arrivals.values())
    result = Result(due[-1][0], dict.fromkeys(profiles, 0))
    over = asyncio.Event()
    running: tuple[PreemptionFlag, list[float]] | None = None

    def end(request: Request, outcome: str) -> None:
        result.outcomes.append((request.id, outcome))
        if outcome == "good":
            result.good[request.model] += 1
        if len(result.outcomes) == number:
            over.set()

    async def batch(dispatch: Dispatch) -> None:
        nonlocal running
        flag, asked = PreemptionFlag(), []
        running = flag, asked
        started = loop.time()
        status = BatchStatus.FINISHED
        try:
            await loop.run_in_executor(pool, _run, run, dispatch, flag)
        except Preempted:
            status = BatchStatus.PREEMPTED
        now = loop.time()
        running = None
        requests = dispatch.requests
        host.finished(worker, BatchOutcome(dispatch.batch_id, requests, started, now, status))
        if status is BatchStatus.PREEMPTED:
            result.delays_s.append(now - asked[0])
        else:
            result.too_late += bool(asked)
        for request in requests:
            if status is BatchStatus.PREEMPTED:
                host.submit(request)
            else:
                end(request, "good" if now <= request.deadline else "late")

    tasks = set()

    def on_dispatch(dispatch: Dispatch) -> None:
        task = loop.create_task(batch(dispatch))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def on_preempt(_: Preempt) -> None:
        if running is not None:
            flag, asked = running
            asked.append(loop.time())
            flag.set()

    def on_drop(drop: Drop) -> None:
        for request in drop.requests:
            end(request, "dropped")

    with ThreadPoolExecutor(1) as pool:
        host = PolicyHost(
            policy, cluster, on_dispatch=on_dispatch, on_drop=on_drop, on_preempt=on_preempt
        )
        start = loop.time()

        ids = count()

        async def submit(at: float, names: list[str]) -> None:
            for name in names:
                host.submit(Request(next(ids), name, start + at, start + at + slo_s))

        await paced(due, submit, start=start)
        await over.wait()
        host.close()
    return result


def _run(
    run: Mapping[str, Callable[[int], object]], dispatch: Dispatch, flag: PreemptionFlag
) -> None:
    with preemption_scope(flag):
        run[dispatch.variant](len(dispatch.requests))
