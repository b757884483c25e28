"""What a planner says when a problem has no solution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P")


@dataclass(frozen=True)
class Infeasible(Generic[P]):
    """No plan meets every constraint.

    `reason` names the constraint and the figures that clash. `best_effort` is a plan that can be
    carried out all the same; it says itself what it leaves out. `proven` is False where the search
    ended without a plan and without a proof that there is none.
    """

    reason: str
    best_effort: P
    proven: bool = True
