"""Planners: pure functions `plan(problem) -> Plan | Infeasible`, one file each.

    from ray_slo.planning import herd
    plan = herd.plan(herd.Problem(models, workers=100, group_worker_limit=12, memory_mb=16_000))

These modules do not import ray or torch, do not read a clock, and do no I/O. A time limit is passed
to the solver.
"""

from ray_slo.planning.result import Infeasible

__all__ = ["Infeasible"]
