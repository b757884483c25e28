"""The host of a planner's brain in virtual time. Like the live planner, it asks the brain, solves
its problems and follows its orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_slo.planning.brains.brain import FIRST, Brain, Counts, NotYet, Seen, Verdict
from ray_slo.record.plans import Outline, PlanLines, Planned

PERIOD = "period"


@dataclass
class Question:
    """A question to the planner, and its answer.

    Attributes:
        at: time of the question, in seconds.
        trigger: cause of the question.
        inputs: input of the plan: `demand` in requests per second, and more.
        running: number of workers with an assignment, by kind.
        problem: the brain's problem.
        answer: the solver's answer.
        error: reason why there is no answer. The last plan stays in force.
    """

    at: float
    trigger: str
    inputs: dict[str, Any]
    running: Mapping[str, int]
    problem: Any = None
    answer: Any = None
    error: str = ""


class PlannerHost:
    """Asks a brain for plans.

    Args:
        brain: the brain. It cannot be used again after the run.
        kinds: kinds of the workers that it plans.
        interval_s: time between plans, in seconds.
        lines: the plan log, if there is one.
    """

    def __init__(
        self,
        brain: Brain,
        kinds: Sequence[str],
        interval_s: float,
        lines: PlanLines | None = None,
    ) -> None:
        self.brain, self.kinds = brain, tuple(kinds)
        self._interval_s, self._lines = interval_s, lines
        self._outline = Outline()  # outline of the last plan that took effect
        self._planned = self._failed = self._solving = False
        self.due_at = 0.0  # time of the next periodic plan, seconds

    def hear(self, now: float, over_s: float, counts: Counts) -> None:
        """Give the brain the counts of the last `over_s` seconds."""
        self.brain.counted(now, over_s, counts)

    def due(self, now: float, seen: Seen) -> str:
        """Return the reason to plan now, or "" if there is none."""
        if self._solving:
            return ""
        if not self._planned:
            return FIRST
        period = PERIOD if now >= self.due_at - 1e-9 else ""
        return period if self._failed else self.brain.due(now, seen) or period

    def ask(self, now: float, trigger: str, seen: Seen) -> Question:
        """Solve the brain's problem. The caller then calls `adopt`.

        Raises:
            Exception: there is no first plan.
        """
        self.due_at = now + self._interval_s
        running = dict.fromkeys(self.kinds, 0)
        for says in seen.workers.values():
            running[says.kind] += bool(says.assigned)
        asked = Question(now, trigger, self.brain.inputs(now, seen), running)
        self._solving = True
        try:
            asked.problem = self.brain.problem(now, seen)
            asked.answer = self.brain.solve(asked.problem)
        except Exception as error:
            if not self._planned:
                raise
            known = isinstance(error, NotYet | ValueError) and asked.problem is None
            asked.error = str(error) if known else f"{type(error).__name__}: {error}"
            self._log(asked)
        return asked

    def adopt(self, asked: Question) -> Verdict | None:
        """Let the brain follow the answer from now on. Return its account, or None if there is no
        answer."""
        self._solving, self._failed = False, bool(asked.error)
        if self._failed:
            return None
        self._planned = True
        return self.brain.adopt(asked.problem, asked.answer)

    def note(
        self, now: float, asked: Question, verdict: Verdict, workers: Mapping[str, str | None]
    ) -> None:
        """Log an answer when it takes effect.

        Args:
            workers: variant of each worker.
        """
        plan = self.brain.outcome()
        targets = {kind: self.brain.target(kind) for kind in self.kinds}
        parts = plan.get("assignments", ())
        outline = Outline.of_assignments(
            targets, [(a["variant"], a["batch_size"], a["workers"]) for a in parts]
        )
        self._log(
            asked,
            targets=targets,
            plan=plan,
            workers=workers,
            changes=outline.changes(self._outline),
            why=verdict.why,
            shortfall=verdict.shortfall,
            took_s=now - asked.at,
        )
        self._outline = outline

    def _log(self, asked: Question, **told: Any) -> None:
        if self._lines is not None:
            inputs = {"workers": asked.running, **asked.inputs}
            demand = inputs.pop("demand", None)
            planned = Planned(asked.at, asked.trigger, demand, inputs, error=asked.error, **told)
            self._lines(planned)
