"""The answer of a planner to a problem without a solution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P")


@dataclass(frozen=True)
class Infeasible(Generic[P]):
    """No plan meets all constraints.

    Attributes:
        reason: the constraint that cannot be met, with its figures.
        best_effort: a plan that can be carried out anyway. Its explanation says what it leaves out.
        proven: whether there is a proof. It is False if the search ended with neither a plan nor a
            proof that there is none.
    """

    reason: str
    best_effort: P
    proven: bool = True


def best(answer: P | Infeasible[P]) -> P:
    """Return the plan to carry out: the answer, or its best effort if it is infeasible."""
    return answer.best_effort if isinstance(answer, Infeasible) else answer
