"""Find how many workers a load needs, of which kinds and with which variants: `size(question)`."""

from ray_slo.simulation.sizing.document import PlanSpec
from ray_slo.simulation.sizing.question import Answer, Question
from ray_slo.simulation.sizing.search import size
from ray_slo.simulation.sizing.what_if import what_if

__all__ = ["Answer", "PlanSpec", "Question", "size", "what_if"]
