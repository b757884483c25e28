"""Live on Ray: how many requests per second one scheduler actor can decide.

Nothing is served. Each of two client processes does what a frontend does for its scheduler
(`ActorChannel`): it submits requests and takes grants. It also does what the granted workers would:
it reports each batch as long after the grant as the batch would take. So the scheduler's core is
all that can be the bottleneck, besides the clients' own. The workers take 10 + 0.5·b ms, the SLO is
200 ms, and there are enough workers for twice the rate.

A case is a policy and a rate of Poisson arrivals. The rate doubles until fewer than 99 % of the
requests would be answered in time.

* *in time*: share of the requests whose batch would end within the SLO;
* *batches/s*: granted batches per second;
* *CPU per request*: of the scheduler's process, microseconds;
* *decision*: 99th percentile of the time from a request's submission to its grant, milliseconds. It
  contains the wait for a batch;
* *ceiling*: the largest rate with at least 99 % in time.

    python -m benchmarks live-ceiling [--policy deferred]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.live.overhead import cpu_s

SOURCE = "ray-slo"
POLICIES = ("deferred", "auto")
CLIENTS = 2
RATES = (500, 1000, 2000, 4000, 8000, 16_000)
SLO_S, ALPHA_S, BETA_S, MAX_BATCH = 0.2, 0.0005, 0.010, 32
ENOUGH = 0.99
_KEY = "ceiling"


class Network:
    """Stands for a model in the specification; it never runs."""

    def __call__(self, items: list[Any]) -> list[Any]:
        return items


def spec_of(policy: str) -> Any:
    """The application whose scheduler is measured."""
    from ray_slo.serve.config.resolve import parse_spec

    return parse_spec(
        {
            "models": {
                "m": {
                    "callable": Network,
                    "latency_slo_ms": 1e3 * SLO_S,
                    "max_batch_size": MAX_BATCH,
                }
            },
            "policy": policy,
            "scheduler": "actor",
        }
    )


class Client:
    """A frontend, and the workers of the batches that it is granted; a Ray actor.

    Args:
        key: name of the scheduler actor.
        number: of the client.
    """

    def __init__(self, policy: str, key: str, number: int) -> None:
        self._spec, self._key, self._number = spec_of(policy), key, number
        self._sent: dict[int, float] = {}
        self._waits_s: list[float] = []
        self._good = self._batches = 0

    async def connect(self) -> int:
        """Connect to the scheduler, and return the ID of its process."""
        from ray_slo.serve.channels.channel import ActorChannel
        from ray_slo.serve.channels.worker_link import WorkerLink
        from ray_slo.serve.messages import Heartbeat, Lead

        self._channel = ActorChannel(
            self._spec, self._key, f"client{self._number}", self._on_messages, lambda: None
        )
        self._lead = Lead()
        self._link = WorkerLink(self._spec, self._key, self._on_lead)
        await self._channel.join(Heartbeat("", "default", {}, []))  # it only waits
        status = await self._channel.status()
        return int(status["scheduler_process"]["pid"])

    async def beat(self, workers: int) -> None:
        """Send the heartbeats of this client's share of the workers, twice a second."""
        from ray_slo.core import LatencyProfile
        from ray_slo.serve.messages import Heartbeat

        profile = LatencyProfile.linear(ALPHA_S, BETA_S, MAX_BATCH)
        own = [f"w{i}" for i in range(self._number, workers, CLIENTS)]

        async def once() -> None:
            lead = self._lead
            about: dict[str, Any] = {"leader": lead, "highest": lead.term}
            for worker in own:
                beat = Heartbeat(worker, "default", {"m": profile}, [], **about)
                await self._link.heartbeat(beat)

        async def forever() -> None:
            while True:
                await asyncio.sleep(0.5)
                await once()

        while not self._lead.term:
            await once()
        await once()
        self._beating = asyncio.get_running_loop().create_task(forever())

    def _on_lead(self, link: Any, lead: Any) -> None:
        self._lead = max(self._lead, lead)

    def _on_messages(self, messages: list[Any]) -> None:
        from ray_slo.serve.messages import Grant

        now, loop = time.monotonic(), asyncio.get_running_loop()
        for message in messages:
            if not isinstance(message, Grant):
                continue
            takes_s = BETA_S + ALPHA_S * message.batch_size
            for request in message.request_ids:
                sent = self._sent.pop(request, None)
                if sent is None:  # of an earlier run
                    continue
                self._waits_s.append(now - sent)
                self._good += now + takes_s - sent <= SLO_S
            if message.piece == 0:  # a batch may be granted to both clients
                self._batches += 1
                loop.call_later(takes_s, self._report, message, takes_s)

    def _report(self, grant: Any, took_s: float) -> None:
        from ray_slo.core import BatchStatus
        from ray_slo.serve.messages import BatchReport

        finished, size = BatchStatus.FINISHED, grant.batch_size
        report = BatchReport(
            *(grant.batch_id, grant.worker, "m", finished, size, took_s, took_s, [(size, took_s)])
        )
        self._link.report(report)

    async def run(self, rate: float, duration_s: float, seed: int) -> dict[str, float]:
        """Submit requests at a rate; what came of them."""
        from ray_slo.serve.messages import Submit

        rng = np.random.default_rng([seed, self._number])
        due = np.cumsum(rng.exponential(1 / rate, int(rate * duration_s)))
        first, self._waits_s = int(rng.integers(1 << 40)), []
        self._good = self._batches = 0
        begin = time.monotonic()
        done = 0
        while done < len(due):
            now = time.monotonic() - begin
            until = int(np.searchsorted(due, now))
            for i in range(done, until):
                self._sent[first + i] = begin + float(due[i])
                self._channel.submit(Submit(first + i, "m", SLO_S - (now - float(due[i]))))
            done = until
            await asyncio.sleep(0.001)
        await asyncio.sleep(2 * SLO_S)
        self._sent.clear()
        return {
            "sent": len(due),
            "good": self._good,
            "batches": self._batches,
            "wait_s": float(np.percentile(self._waits_s, 99)) if self._waits_s else float("nan"),
        }

    async def leave(self) -> None:
        self._channel.close()
        if hasattr(self, "_beating"):
            self._beating.cancel()


def workers_for(rate: float) -> int:
    """Workers that serve twice the rate in full batches."""
    return max(CLIENTS, int(np.ceil(2 * rate * (BETA_S / MAX_BATCH + ALPHA_S))))


def measured(policy: str, rate: float, duration_s: float, seed: int) -> list[Row]:
    """The rows of one case, on the Ray that runs."""
    import ray

    key = f"{_KEY}-{policy}-{rate:g}"
    clients = [
        ray.remote(num_cpus=0)(Client).remote(policy, key, number) for number in range(CLIENTS)
    ]
    try:
        pid, *_ = ray.get([client.connect.remote() for client in clients])
        ray.get([client.beat.remote(workers_for(rate)) for client in clients])
        ray.get([client.run.remote(rate / CLIENTS, 2.0, seed + 1) for client in clients])
        before = cpu_s(pid)
        runs = ray.get([client.run.remote(rate / CLIENTS, duration_s, seed) for client in clients])
        used_s = cpu_s(pid) - before
    finally:
        ray.get([client.leave.remote() for client in clients])
        for actor in (*clients, ray.get_actor(key, namespace="ray_slo")):
            ray.kill(actor)
    sent = sum(run["sent"] for run in runs)
    case = f"{policy}, {rate:g} requests/s"
    return [
        Row(case, "in time", "%", 100 * sum(run["good"] for run in runs) / sent),
        Row(case, "batches/s", "/s", sum(run["batches"] for run in runs) / duration_s),
        Row(case, "CPU per request", "µs", 1e6 * used_s / sent),
        Row(case, "decision", "ms", 1e3 * max(run["wait_s"] for run in runs)),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", choices=POLICIES, help="only this one")


def run(quick: bool, seed: int, policy: str | None = None) -> list[Row]:
    import ray

    rows: list[Row] = []
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        for one in (policy,) if policy else POLICIES[:1] if quick else POLICIES:
            ceiling = None
            for rate in RATES[:1] if quick else RATES:
                rows += (found := measured(one, rate, 2.0 if quick else 10.0, seed))
                if found[0].ours is None or found[0].ours < 100 * ENOUGH:
                    break
                ceiling = float(rate)
            rows.append(Row(f"{one}, ceiling", "ceiling", "/s", ceiling))
    finally:
        ray.shutdown()
    return rows
