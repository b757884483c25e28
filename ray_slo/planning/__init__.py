"""Planners: pure functions `plan(problem) -> Plan | Infeasible`, one file each.

    from ray_slo.planning import herd
    plan = herd.plan(herd.Problem(models, workers=100, group_worker_limit=12, memory_mb=16_000))

Nothing here imports ray or torch, reads a clock or does I/O; a time limit is passed to the solver.
"""

from ray_slo.planning.result import Infeasible

__all__ = ["Infeasible"]
