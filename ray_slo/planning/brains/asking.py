"""When a brain is asked for a plan, and what came of it. The live planner and the simulator share
this. They differ in the clock, and in where a problem is solved. Pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ray_slo.planning.brains.brain import Brain, NotYet, Seen, Verdict
from ray_slo.record.plans import Outline, Planned

logger = logging.getLogger(__name__)

PERIOD = "period"
_RETRY_S = 10.0  # time until the next attempt after planning failed


@dataclass(frozen=True)
class Question:
    """A question to the planner.

    Attributes:
        at: time of the question, in seconds.
        trigger: cause of the question.
        inputs: input of the plan: `demand` in requests per second, and more.
        problem: the brain's problem. None if there is an error.
        error: reason why there is no problem.
    """

    at: float
    trigger: str
    inputs: Mapping[str, Any]
    problem: Any = None
    error: str = ""


class Asking:
    """Asks a brain for plans. The host solves the problems. It has one question at a time.

    Attributes:
        brain: the brain.
        asked_at: time of the last question, in seconds. None before the first one.
        interval_s: time between plans, in seconds.
        error: reason why the last question has no plan, or what the plan cannot serve. None: all is
            well.

    Args:
        kinds: kinds of the workers that the brain plans.
        log: function that logs a question, if there is a log.
        gap_s: least time between plans, in seconds.
    """

    def __init__(
        self,
        brain: Brain,
        kinds: Iterable[str],
        interval_s: float = math.inf,
        log: Callable[[Planned], None] | None = None,
        gap_s: float = 1.0,
    ) -> None:
        self.brain, self.interval_s = brain, interval_s
        self.asked_at: float | None = None
        self.error: str | None = None
        self._kinds, self._log, self._gap_s = tuple(kinds), log, gap_s
        self._outline: Outline | None = None  # outline of the last plan that took effect
        self._failed = False  # whether the last answer failed

    def due(self, now: float, seen: Seen) -> str:
        """Return the reason to plan now, or "" if there is none."""
        if self.asked_at is None:
            return ""
        since_s = now - self.asked_at + 1e-9
        period = PERIOD if since_s >= self.interval_s else ""
        if self._failed:
            return period or ("tried again" if since_s >= _RETRY_S else "")
        if period or since_s >= self._gap_s:
            return self.brain.due(now, seen) or period
        return ""

    def ask(self, now: float, trigger: str, seen: Seen, running: Mapping[str, int]) -> Question:
        """Return a question. If it has a problem, the caller solves it, and then calls `adopt` or
        `failed`.

        Args:
            running: number of workers, by kind.

        Raises:
            NotYet: too little is known. It is as if nothing was asked.
        """
        problem, error = None, ""
        try:
            problem = self.brain.problem(now, seen)
        except ValueError as reason:
            error = str(reason)
        except NotYet:
            raise
        except Exception as reason:
            logger.exception("there is no problem to solve; the last plan holds")
            error, self._failed = f"planning failed: {type(reason).__name__}: {reason}", True
        self.asked_at = now
        asked = self.asked(now, trigger, seen, running, problem, error)
        if error and error != self.error:  # it may happen every second
            self._note(asked, error=error)
        self.error = error or self.error
        return asked

    def asked(
        self,
        now: float,
        trigger: str,
        seen: Seen,
        running: Mapping[str, int],
        problem: Any = None,
        error: str = "",
    ) -> Question:
        """Return a question with the present inputs. Arguments as in `ask` and `Question`."""
        if self._outline is None:  # the workers may follow the plan of another planner
            parts = [a for says in seen.workers.values() for a in says.assigned]
            triples = [(a.variant, a.batch_size, 1) for a in parts]
            self._outline = Outline.of_assignments(running, triples) if parts else None
        avoided = {"avoided": sorted(map("@".join, seen.avoided))} if seen.avoided else {}
        inputs = {"workers": running, **self.brain.inputs(now, seen), **avoided}
        return Question(now, trigger, inputs, problem, error)

    def adopt(self, asked: Question, answer: Any) -> Verdict:
        """Let the brain follow the answer from now on. The caller gives the orders to workers, and
        then calls `note`."""
        verdict = self.brain.adopt(asked.problem, answer)
        self._failed, self.error = False, verdict.why if verdict.holds else verdict.shortfall
        return verdict

    def failed(self, asked: Question, error: Exception, took_s: float | None = None) -> None:
        """Note that a problem could not be solved. The last plan stays."""
        self._failed = True
        self.error = f"planning failed: {type(error).__name__}: {error}"
        self._note(asked, error=self.error, took_s=took_s)

    def note(
        self,
        asked: Question,
        verdict: Verdict,
        workers: Mapping[str, str | None],
        took_s: float | None = None,
    ) -> None:
        """Log an answer when it takes effect.

        Args:
            workers: variants or group of each worker.
            took_s: time from the question to now, in seconds. None: nothing was solved.
        """
        if verdict.holds:
            self._note(asked, error=verdict.why, took_s=took_s)
            return
        plan = self.brain.outcome()
        targets = plan.get("sizes") or {kind: self.brain.target(kind) for kind in self._kinds}
        parts = [(a["variant"], a["batch_size"], a["workers"]) for a in plan.get("assignments", ())]
        outline = Outline.of_assignments(targets, parts)
        outline = replace(outline, groups=plan.get("groups", {}))
        self._note(
            asked,
            targets=targets,
            plan=plan,
            workers=workers,
            changes=outline.changes(self._outline or Outline()),
            why=verdict.why,
            shortfall=verdict.shortfall,
            took_s=took_s,
        )
        self._outline = outline

    def _note(self, asked: Question, **told: Any) -> None:
        if self._log is not None:
            inputs = dict(asked.inputs)
            demand = inputs.pop("demand", None)
            self._log(Planned(asked.at, asked.trigger, demand, inputs, **told))
