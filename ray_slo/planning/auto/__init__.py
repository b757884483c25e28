"""Plan an application of any shape: trees of tasks with variants, on workers of several kinds.

The stages, each a module: what is asked (`problem.py`) and answered (`plan.py`); how many workers
of which kind serve which variants (`program.py`); what each worker has loaded (`pack.py`), and
which worker that is (`place.py`).
"""

from ray_slo.planning.auto.place import place, swaps
from ray_slo.planning.auto.plan import Plan, Prices, Slot, Step
from ray_slo.planning.auto.problem import (
    Demand,
    Hosted,
    Kind,
    Model,
    Objective,
    Problem,
    Size,
    Variant,
)
from ray_slo.planning.auto.steps import plan

__all__ = [
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
    "place",
    "plan",
    "swaps",
]
