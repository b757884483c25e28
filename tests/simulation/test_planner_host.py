"""The simulator calls a planner's brain as the live planner does."""

import pytest

from ray_slo.core.cluster import Assigned
from ray_slo.planning.brains.brain import Brain, NotYet, Seen, Verdict, WorkerSays
from ray_slo.simulation.planner_host import PlannerHost

SEEN = Seen({"w": WorkerSays("w", "cpu", assigned=(Assigned("v", 1),))})


class Counting(Brain):
    """Its problem is how often it was asked; what is due and what fails is set from outside."""

    def __init__(self):
        self.asked, self.news, self.fails, self.adopted = 0, "", None, []

    @property
    def solve(self):
        return lambda problem: 10 * problem

    def configure(self, setting):
        return None

    def counted(self, now, over_s, counts):
        return None

    def wanted(self, now, seen, hopeless):
        return {}

    def outcome(self):
        return {}

    def problem(self, now, seen):
        self.asked += 1
        if self.fails:
            raise self.fails
        return self.asked

    def due(self, now, seen):
        return self.news

    def adopt(self, problem, answer):
        self.adopted.append((problem, answer))
        return Verdict("so")

    def inputs(self, now, seen):
        return {"demand": 2.0}


def hosted():
    brain = Counting()
    return brain, PlannerHost(brain, ["cpu"], interval_s=10.0)


def test_it_plans_at_first_then_every_interval_and_when_something_changed():
    brain, host = hosted()
    assert host.due(0.0, SEEN) == "first plan"
    asked = host.ask(0.0, "first plan", SEEN)
    assert (asked.inputs, asked.running, asked.answer) == ({"demand": 2.0}, {"cpu": 1}, 10)
    assert host.due(0.5, SEEN) == ""  # it is being solved
    assert host.adopt(asked) == Verdict("so")
    assert brain.adopted == [(1, 10)]
    assert [host.due(now, SEEN) for now in (1.0, 9.9, 10.0)] == ["", "", "period"]
    brain.news = "demand changed"
    assert host.due(1.0, SEEN) == "demand changed"


def test_without_a_first_plan_there_is_no_run():
    brain, host = hosted()
    brain.fails = NotYet("no worker is there yet")
    with pytest.raises(NotYet):
        host.ask(0.0, "first plan", SEEN)


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("no variant"), "no variant"), (RuntimeError("licence"), "RuntimeError: licence")],
)
def test_after_a_failure_the_last_plan_holds_for_a_period(error, said):
    brain, host = hosted()
    host.adopt(host.ask(0.0, "first plan", SEEN))
    brain.fails, brain.news = error, "demand changed"
    asked = host.ask(3.0, brain.news, SEEN)
    assert (asked.error, asked.answer) == (said, None)
    assert host.adopt(asked) is None
    assert len(brain.adopted) == 1
    assert host.due(4.0, SEEN) == ""
    assert host.due(13.0, SEEN) == "period"
