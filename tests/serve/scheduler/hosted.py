"""A scheduler without Ray, and messages of workers and frontends to it."""

import contextlib

from ray_slo.core import BatchStatus
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.messages import BatchReport, Submit
from ray_slo.serve.scheduler.scheduler import Scheduler
from tests.serve.fakes import Box, Fifo


@contextlib.asynccontextmanager
async def running(policy=Fifo, variants=None, slo_classes=None, **options):
    model = {"callable": Fifo, "latency_slo_ms": 1000, "max_batch_size": 8}
    models = {"m": {**model, "variants": variants or {}, "slo_classes": slo_classes or {}}}
    spec = parse_spec({"models": models, "policy": policy})
    box = Box()
    scheduler = Scheduler(spec, box, **options)
    try:
        yield scheduler, box
    finally:
        scheduler.close()


def report(grant, status=BatchStatus.FINISHED, measured=(), worker="w0"):
    size, variant = grant.batch_size, grant.variant
    return BatchReport(grant.batch_id, worker, variant, status, size, 0.02, 0.02, list(measured))


def submits(*ids, size=1):
    return [Submit(i, "m", 1.0, size) for i in ids]
