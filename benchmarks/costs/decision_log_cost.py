"""Cost of the decision log per decision, on the event loop and in total.

One scheduler runs on an event loop, without Ray. It gets a Poisson stream of requests. Eight
workers answer after ℓ(b) = 1 ms · b + 5 ms. Runs without a log and with one alternate. *Loop*: what
the log adds to a decision on the event loop, timed around every hand-over to the log. *In all*:
this, plus the CPU time of the writing thread, per decision. *Late*: the 99th percentile of the
delay of an event-loop timer; a decision waits as long while the interpreter is busy writing.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row

SOURCE = "ray-slo"
ALPHA_S, BETA_S = 0.001, 0.005
WORKERS = 8
SLO_MS = 100.0


def run(quick: bool, seed: int) -> list[Row]:
    rows = []
    seconds, repeats = (0.5, 1) if quick else (6.0, 3)
    for rate in (500,) if quick else (200, 1000):
        seen: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for i in range(repeats):
            for logged in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    log = folder if logged else None
                    seen[logged].append(asyncio.run(_serve(rate, seconds, seed + i, log)))
        case = f"{rate} requests/s"

        without, with_log = (
            {name: float(np.median([s[name] for s in seen[logged]])) for name in seen[logged][0]}
            for logged in (False, True)
        )
        rows += [
            Row(case, "decision without log, CPU of all", "µs", without["cpu_us"]),
            Row(case, "added on the loop", "µs", with_log["loop_us"]),
            Row(case, "added in all, CPU", "µs", with_log["loop_us"] + with_log["thread_us"]),
            Row(case, "timer late without log", "ms", without["late_ms"]),
            Row(case, "timer late with log", "ms", with_log["late_ms"]),
            Row(case, "on disk", "bytes/request", with_log["bytes"]),
            Row(case, "rows lost", "", sum(s["lost"] for s in seen[True])),
        ]
    return rows


async def _serve(rate: float, seconds: float, seed: int, folder: str | None) -> dict[str, float]:
    from ray_slo.core import BatchStatus, LatencyProfile
    from ray_slo.serve.config.resolve import parse_spec
    from ray_slo.serve.messages import BatchReport, Grant, Heartbeat, Submit
    from ray_slo.serve.scheduler.scheduler import Scheduler

    loop = asyncio.get_running_loop()
    never_run = {"callable": "benchmarks.live.sleeper:Sleeper", "args": (ALPHA_S, BETA_S)}
    model = {**never_run, "latency_slo_ms": SLO_MS}
    log = folder and {"dir": folder, "flush_s": 2.0}
    spec = parse_spec({"models": {"m": model}, "policy": "deferred", "decision_log": log})

    def deliver(client: str, messages: list[Any]) -> None:
        for m in messages:
            if isinstance(m, Grant):
                size = m.batch_size
                exec_s = ALPHA_S * size + BETA_S
                report = BatchReport(
                    *(m.batch_id, m.worker, "m", BatchStatus.FINISHED, size, exec_s, exec_s),
                    [(size, exec_s)],
                )
                loop.call_later(exec_s, scheduler.report, report)

    scheduler = Scheduler(spec, deliver)
    timed, rounds = _timed(scheduler), _rounds(scheduler)
    profile = LatencyProfile.linear(ALPHA_S, BETA_S, 64)
    for i in range(WORKERS):
        scheduler.heartbeat(Heartbeat(f"w{i}", "default", {"m": profile}, []))
    rng = np.random.default_rng(seed)
    late, number = [], 0
    gc.collect()
    begin = at = time.perf_counter()
    cpu = time.process_time()
    while at < begin + seconds:
        at += rng.exponential(1 / rate)
        if (nap := at - time.perf_counter()) > 0:
            await asyncio.sleep(nap)
            late.append(time.perf_counter() - at)
        scheduler.hear("c", (Submit(number, "m", SLO_MS / 1e3),))
        number += 1
    await asyncio.sleep(0.3)
    scheduler.close()
    if scheduler._log is not None:
        await asyncio.to_thread(scheduler._log.close, 10.0)
    cpu = time.process_time() - cpu
    written_s = scheduler._log.status()["cpu_s"] if scheduler._log else 0.0
    size = await asyncio.to_thread(_size, folder) if folder else 0
    return {
        "cpu_us": 1e6 * cpu / rounds[0],
        "thread_us": 1e6 * written_s / rounds[0],
        "loop_us": 1e6 * sum(timed) / max(len(timed), 1),
        "late_ms": 1e3 * float(np.percentile(late, 99)),
        "bytes": size / number,
        "lost": scheduler._log.status()["rows_lost"] if scheduler._log else 0,
    }


def _size(folder: str) -> int:
    return sum(f.stat().st_size for f in Path(folder).iterdir())


def _timed(scheduler: Any) -> list[float]:
    """Return a list that is filled with the seconds of each hand-over to the log."""
    times: list[float] = []
    if scheduler._log is not None:
        recording = scheduler._host.policy.policy  # inside the wrapper that handles nodes
        put = recording._sink

        def timed(round: Any) -> None:
            begin = time.perf_counter()
            put(round)
            times.append(time.perf_counter() - begin)

        recording._sink = timed
    return times


def _rounds(scheduler: Any) -> list[int]:
    """Return a list whose only element counts the decisions."""
    count = [0]
    host = scheduler._host
    decide = host.policy.decide

    def counted(now: float) -> Any:
        count[0] += 1
        return decide(now)

    host.policy.decide = counted
    return count
