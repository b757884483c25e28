"""The simulator calls a planner's brain as the live planner does."""

import pytest

from ray_slo.core.cluster import Assigned
from ray_slo.planning.brains.brain import Brain, NotYet, Seen, Verdict, WorkerSays
from ray_slo.record.plans import Planned
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


def test_answers_and_failures_are_logged():
    brain, lines = Counting(), []
    host = PlannerHost(brain, ["cpu", "gpu"], interval_s=10.0, lines=lines.append)
    brain.outcome = lambda: {"assignments": [{"variant": "v", "batch_size": 1, "workers": 2}]}
    brain.target = {"cpu": 2, "gpu": None}.get
    for at, took_s in ((0.0, 0.5), (10.0, 0.25)):
        asked = host.ask(at, "period", SEEN)
        assert asked.running == {"cpu": 1, "gpu": 0}
        host.note(at + took_s, asked, host.adopt(asked), {"w": "v"})
    brain.fails = ValueError("no variant")
    host.adopt(host.ask(20.0, "period", SEEN))
    told = {"trigger": "period", "demand": 2.0, "inputs": {"workers": {"cpu": 1, "gpu": 0}}}
    told |= {"targets": {"cpu": 2, "gpu": None}, "plan": brain.outcome(), "workers": {"w": "v"}}
    told |= {"why": "so"}
    news = ["cpu: – → 2 workers", "v: 0 → 2 workers"]
    assert lines == [
        Planned(0.0, **told, changes=news, took_s=0.5),
        Planned(10.0, **told, changes=[], took_s=0.25),
        Planned(20.0, "period", 2.0, told["inputs"], error="no variant"),
    ]
