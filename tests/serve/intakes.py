"""An intake of requests with fakes around it."""

from types import SimpleNamespace

from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.frontend.intake import Intake
from tests.serve.fakes import Silent, surroundings


def intake(*models, preprocess=(), capacity=None, has_door_before=False, **options):
    """An intake of these models; its `seen` is what it said to metrics, `refused` to the others."""
    spec = parse_spec(
        {
            "models": {m: {"callable": "apps:M", "latency_slo_ms": 400} for m in models or "m"},
            "name": "app",
            **options,
        }
    )
    metrics, refused = Silent(), []
    one = Intake(
        spec,
        surroundings("app", metrics=metrics, has_door_before=has_door_before),
        SimpleNamespace(preprocess=preprocess),
        {"m": capacity}.get,
        lambda model, count: refused.append((model, count)),
    )
    one.seen, one.refused = metrics.seen, refused
    return one
