"""The planner `auto`: plans trees of tasks with variants, on workers of several kinds.

Each stage is a module: the problem (`problem.py`) and the plan (`plan.py`), the number of workers
of each kind for each variant (`program.py`), what each worker loads (`pack.py`), and the assignment
to real workers (`place.py`).
"""

from ray_slo.planning.auto.place import place
from ray_slo.planning.auto.plan import Plan, Prices, Slot, Step
from ray_slo.planning.auto.problem import (
    LOKI,
    Demand,
    Hosted,
    Kind,
    Model,
    Objective,
    Problem,
    Size,
    Variant,
    most_accurate,
)
from ray_slo.planning.auto.steps import plan

__all__ = [
    "LOKI",
    "Demand",
    "Hosted",
    "Kind",
    "Model",
    "Objective",
    "Plan",
    "Prices",
    "Problem",
    "Size",
    "Slot",
    "Step",
    "Variant",
    "most_accurate",
    "place",
    "plan",
]
