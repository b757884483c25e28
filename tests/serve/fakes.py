"""Fakes for frontends, schedulers and workers: policies, models, metrics and connections."""

import asyncio
import json
import pickle
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

from ray import cloudpickle
from starlette.requests import Request

import ray_slo
from ray_slo.core import (
    Decision,
    Dispatch,
    Drop,
    DropReason,
    LatencyProfile,
    Preempt,
)
from ray_slo.serve.frontend.surroundings import Surroundings
from ray_slo.serve.messages import Heartbeat, Piece
from ray_slo.serve.watch.lately import Seen


class Fifo:
    """One batch per free worker, of at most four, oldest first; drops what is marked by size 9."""

    serves_late = True

    def __init__(self):
        self.queue, self.busy, self.cluster, self.ended, self.count = [], {}, None, [], 0

    def requests_arrived(self, now, requests):
        self.queue += requests

    def requests_cancelled(self, now, requests):
        self.queue = [r for r in self.queue if r not in requests]

    def batch_finished(self, now, worker, outcome):
        assert self.busy.pop(worker) == outcome.batch_id
        self.ended.append((worker, outcome.status))

    def cluster_changed(self, now, cluster):
        self.cluster = cluster
        self.busy = {w: b for w, b in self.busy.items() if w in cluster.workers}

    def decide(self, now):
        if any(r.size == 13 for r in self.queue):
            raise RuntimeError("a policy that cannot cope")
        actions = []
        if dropped := [r for r in self.queue if r.size == 9]:
            self.queue = [r for r in self.queue if r.size != 9]
            actions.append(Drop(dropped, DropReason.SHED, now + 5))
        for worker in self.cluster.workers:
            if worker not in self.busy and self.queue:
                batch, self.queue = self.queue[:4], self.queue[4:]
                self.count += 1
                self.busy[worker] = self.count
                actions.append(Dispatch(self.count, worker, "m", batch, now, now + 0.1))
        return Decision(actions)


class Box:
    """What the scheduler delivered, by client."""

    def __init__(self):
        self.messages = {}

    def __call__(self, client, messages):
        self.messages.setdefault(client, []).extend(messages)

    def take(self, client="a"):
        return self.messages.pop(client, [])


def beat(worker="w0", batches=(), kind="default", variants=("m",)):
    profiles = {v: LatencyProfile.linear(0.001, 0.01, 8) for v in variants}
    return Heartbeat(worker, kind, profiles, list(batches))


async def obeys(actor, beat):
    """Register a worker with a scheduler actor that leads."""
    lead = await actor.heartbeat(beat)
    await actor.heartbeat(replace(beat, leader=lead, highest=lead.term))


def piece(name, *items, variant="m"):
    """A batch in one piece."""
    return Piece(name, variant, list(items), 0, 1, 0.0)


STEP_S = 0.002


finished = Counter()  # how often an item was worked on to the end


class Steps:
    """An item is (name, number of steps); the batch takes as many as its longest item."""

    def __call__(self, items):
        for _ in range(max(steps for _, steps in items)):
            time.sleep(STEP_S)
            ray_slo.checkpoint()
        finished.update(name for name, _ in items)
        return [name for name, _ in items]


class Deaf(Steps):
    """Never looks at the flag; "long" ends when the test says so."""

    end = threading.Event()

    def __call__(self, items):
        while any(name.startswith("long") for name, _ in items) and not self.end.is_set():
            time.sleep(STEP_S)
        finished.update(name for name, _ in items)
        return [name for name, _ in items]


class Impatient:
    """Serves the latest deadlines first, and preempts what runs for a later one.

    With `at_random`, it preempts in a third of its decisions.
    """

    serves_late = True
    preempts = True

    def __init__(self, size=1, at_random=None):
        self.size = size
        self.queue, self.running, self.count, self.failed = [], None, 0, []
        self.random = None if at_random is None else random.Random(at_random)

    def requests_arrived(self, now, requests):
        self.queue += requests

    def requests_cancelled(self, now, requests):
        self.queue = [r for r in self.queue if r not in requests]

    def batch_finished(self, now, worker, outcome):
        assert self.running.batch_id == outcome.batch_id
        self.running = None

    def preempt_failed(self, now, worker, batch_id):
        assert self.running.batch_id == batch_id
        self.failed.append(batch_id)

    def cluster_changed(self, now, cluster):
        Impatient.newest = self
        self.worker = next(iter(cluster.workers), None)

    def is_better(self, running):
        if self.random is not None:
            return self.random.random() < 1 / 3
        return self.queue[-1].deadline > max(r.deadline for r in running)

    def decide(self, now):
        actions = []
        if late := [r for r in self.queue if r.deadline <= now]:
            self.queue = [r for r in self.queue if r not in late]
            actions.append(Drop(late, DropReason.WOULD_MISS))
        self.queue.sort(key=lambda r: r.deadline)
        if self.running is not None and self.queue:
            if self.is_better(self.running.requests):
                actions.append(Preempt("w0", "because", "m", len(self.queue)))
        elif self.queue and self.worker:
            self.count += 1
            batch, self.queue = self.queue[-self.size :], self.queue[: -self.size]
            self.running = Dispatch(self.count, "w0", "m", batch, now, now + 0.1)
            actions.append(self.running)
        return Decision(actions, now + 0.003 if self.random and self.queue else float("inf"))


class Wire:
    """A handle: calls the worker after a while, each method after its own."""

    deployment_name = "m-worker"

    def __init__(self, worker, **delays):
        self.worker, self.delays = worker, delays

    def __getattr__(self, name):
        async def call(*args, **kwargs):
            delay = self.delays.get(name, 0.0)
            await asyncio.sleep(delay() if callable(delay) else delay)
            return await getattr(self.worker, name)(*args, **kwargs)

        return SimpleNamespace(remote=call)


class Silent:
    """Stands in for metrics."""

    def __init__(self):
        self.seen = []

    def __getattr__(self, name):
        return lambda *args: self.seen.append((name, *args))

    def seen_lately(self, pending):
        return Seen(pending)


def surroundings(name, **others):
    """A frontend's, without Ray."""
    known = {"metrics": Silent(), "states": lambda app, kinds: {}, "details": dict, **others}
    return Surroundings("app", name, "front", **known)


async def ask(front, method="POST", path="/", item=None, **headers):
    """What the frontend answers to this item over HTTP."""

    async def receive():
        return {"type": "http.request", "body": json.dumps(item).encode(), "more_body": False}

    headers = {"content-type": "application/json", **headers}
    scope = {
        "type": "http",
        "method": method,
        "path": f"/app{path}",
        "root_path": "/app",
        "query_string": b"",
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
    }
    return await front(Request(scope, receive))


def over_handle(values):
    """Ray puts buffers into memory that nobody may write to."""
    buffers = []
    pickled = cloudpickle.dumps(values, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(pickled, buffers=[memoryview(bytes(b.raw())) for b in buffers])


class GrpcCall:
    """The context of a gRPC call."""

    def __init__(self, *metadata):
        self.metadata, self.code = metadata, None

    def invocation_metadata(self):
        return self.metadata

    def set_code(self, code):
        self.code = code.name

    def set_details(self, details):
        self.details = details

    def set_trailing_metadata(self, metadata):
        self.trailing = metadata


class NeverRead:
    """Can be pickled, and not read."""

    def __init__(self, one, two):
        self.one = one

    def __reduce__(self):
        return NeverRead, (self.one,)
