"""Find how many workers a load needs, of which kinds and with which variants: `size(question)`."""

from ray_slo.simulation.sizing.document import (
    PipelineSpec,
    PlanSpec,
    PoolSpec,
    StageSpec,
    StageVariantSpec,
)
from ray_slo.simulation.sizing.question import Answer, Figures, Question
from ray_slo.simulation.sizing.search import size
from ray_slo.simulation.sizing.what_if import what_if

__all__ = [
    "Answer",
    "Figures",
    "PipelineSpec",
    "PlanSpec",
    "PoolSpec",
    "Question",
    "StageSpec",
    "StageVariantSpec",
    "size",
    "what_if",
]
