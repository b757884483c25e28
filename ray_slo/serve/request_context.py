"""The public names of `ray_slo.serve.deadlines`."""

from ray_slo.serve.deadlines import deadline_scope, remaining_ms

__all__ = ["deadline_scope", "remaining_ms"]
