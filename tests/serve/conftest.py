"""Frontends with their schedulers and workers, in one process and without Ray."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.frontend.frontend import Frontend
from ray_slo.serve.worker import batches, registration
from ray_slo.serve.worker import worker as worker_module
from ray_slo.serve.worker.worker import Worker
from tests.serve.fakes import Deaf, Impatient, Silent, Steps, Wire, finished, surroundings
from tests.serve.pipelines import Handle, Spell


@pytest.fixture
def app(monkeypatch):
    """`async with app(user_class, policy, …) as (frontend, worker)`."""
    context = SimpleNamespace(app_name="app", deployment="m-worker", replica_tag="w0", rank=0)
    fake = SimpleNamespace(get_replica_context=lambda: context)
    monkeypatch.setattr(worker_module, "serve", fake)
    monkeypatch.setattr(batches, "WorkerMetrics", Silent)
    link = SimpleNamespace(
        report=lambda report: None, heartbeat=lambda beat: asyncio.sleep(0), close=lambda: None
    )
    monkeypatch.setattr(registration, "WorkerLink", lambda *args: link)
    finished.clear()

    @contextlib.asynccontextmanager
    async def running(
        user_class=Steps, policy=None, wire=None, model=None, models=None, around=None, **options
    ):
        one = {"m": {"callable": user_class, "latency_slo_ms": 30_000, **(model or {})}}
        spec = parse_spec(
            {
                "models": models or one,
                "policy": policy or Impatient,
                "name": "m",
                **options,
            }
        )
        worker = Worker.__new__(Worker)
        await worker.__init__(spec, "default", "m")
        front = Frontend.__new__(Frontend)
        wire = Wire(worker, **(wire or {}))
        await front.__init__(spec, {"default": wire}, surroundings("m", **(around or {})))
        try:
            yield front, worker
        finally:
            Deaf.end.set()
            front.__del__()
            worker.__del__()

    return running


@pytest.fixture
def running(monkeypatch):
    """`async with running(spec) as (frontend, handle)`; two workers."""

    def is_worker(name):
        context = SimpleNamespace(app_name="app", deployment="p-worker", replica_tag=name, rank=0)
        fake = SimpleNamespace(get_replica_context=lambda: context)
        monkeypatch.setattr(worker_module, "serve", fake)

    monkeypatch.setattr(batches, "WorkerMetrics", Silent)
    link = SimpleNamespace(
        report=lambda report: None, heartbeat=lambda beat: asyncio.sleep(0), close=lambda: None
    )
    monkeypatch.setattr(registration, "WorkerLink", lambda *args: link)
    Spell.ran = []
    Spell.gate.clear()

    @contextlib.asynccontextmanager
    async def run(spec, **around):
        workers = {}
        for name in ("w0", "w1"):
            is_worker(name)
            workers[name] = Worker.__new__(Worker)
            await workers[name].__init__(spec, "default", "p")
        front = Frontend.__new__(Frontend)
        handle = Handle(workers)
        await front.__init__(
            spec, {"default": handle}, surroundings("p", metrics=handle.metrics, **around)
        )
        link.heartbeat = front.slo_heartbeat
        for worker in workers.values():
            await worker.registration.tell()
        try:
            yield front, handle
        finally:
            Spell.gate.set()
            front.__del__()
            for worker in workers.values():
                worker.__del__()

    return run
