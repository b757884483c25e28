"""InferLine as Loki's paper compares with it (§6.1): pipeline-aware hardware scaling, one variant.

The client names the variant of each task; here it is the most accurate one. Then Loki's program is
hardware scaling over paths, with its latency constraint, headroom and period. It is solved exactly.
InferLine's own search is a heuristic for the same problem, so this is at least as good. If all
workers are too few, they serve the largest possible share of the demand, the same at every task.
This is Loki's step 3 with one variant. So no task serves more than the others can follow.
"""

from __future__ import annotations

from dataclasses import replace

from ray_slo.planning import auto
from ray_slo.planning.brains.auto import AutoBrain
from ray_slo.planning.brains.auto_jobs import AutoSetting
from ray_slo.planning.result import best


class InferLineBrain(AutoBrain):
    """A planner for `simulate_application`, with the most accurate variants only."""

    def __init__(self, setting: AutoSetting) -> None:
        problem = auto.most_accurate(setting.problem)
        first = best(auto.plan(problem)).workers
        super().__init__(replace(setting, problem=problem, first_workers=first))
