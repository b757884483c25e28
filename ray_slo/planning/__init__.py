"""Planning: `auto` turns a problem into a plan, or says why there is none. `brains` decides what a
planner does per period. The papers' own planners are in `ray_slo.papers`.

    from ray_slo.planning import auto
    plan = auto.plan(problem)

These modules do not import ray or torch, do not read a clock, and do no I/O. A time limit is passed
to the solver.
"""

from ray_slo.planning.result import Infeasible

__all__ = ["Infeasible"]
