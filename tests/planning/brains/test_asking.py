"""When a brain is asked for a plan, what is said if it fails, and what is logged."""

import pytest

from ray_slo.core.cluster import Assigned
from ray_slo.planning.brains.asking import Asking, Question
from ray_slo.planning.brains.brain import Brain, NotYet, Seen, Verdict, WorkerSays
from ray_slo.record.plans import Planned

SEEN = Seen({"w": WorkerSays("w", "cpu")})


class Counting(Brain):
    """Its problem is how often it was asked; what is due and what fails is set from outside."""

    def __init__(self):
        self.asked, self.news, self.fails, self.adopted = 0, "", None, []
        self.verdict = Verdict("so")

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
        return self.verdict

    def inputs(self, now, seen):
        return {"demand": 2.0}


def asking_of(**options):
    brain = Counting()
    return brain, Asking(brain, ["cpu"], interval_s=10.0, **options)


def ask(asking, now, seen=SEEN):
    return asking.ask(now, "because", seen, {"cpu": 1})


def plan(asking, now):
    asked = ask(asking, now)
    return asked, asking.adopt(asked, asking.brain.solve(asked.problem))


def test_it_plans_every_interval_and_when_something_changed():
    brain, asking = asking_of()
    assert asking.due(0.0, SEEN) == ""  # the host makes the first plan
    asked, verdict = plan(asking, 0.0)
    assert asked == Question(0.0, "because", {"workers": {"cpu": 1}, "demand": 2.0}, 1)
    assert (verdict, brain.adopted) == (Verdict("so"), [(1, 10)])
    assert [asking.due(now, SEEN) for now in (1.0, 9.9, 10.0)] == ["", "", "period"]
    brain.news = "demand changed"
    assert [asking.due(now, SEEN) for now in (0.9, 1.0, 10.0)] == ["", *["demand changed"] * 2]


def test_without_a_planner_nothing_is_due_but_what_changed():
    asking = Asking(Counting(), ["cpu"])
    plan(asking, 0.0)
    assert asking.due(1e9, SEEN) == ""


def test_if_too_little_is_known_it_is_as_if_nothing_was_asked():
    brain, asking = asking_of()
    brain.fails = NotYet("no worker is there yet")
    with pytest.raises(NotYet, match="no worker"):
        ask(asking, 0.0)
    assert (asking.asked_at, asking.error) == (None, None)


def test_a_problem_that_has_no_plan_is_logged_once_and_asked_again_when_something_changed():
    lines = []
    brain, asking = asking_of(log=lines.append)
    brain.fails, brain.news = ValueError("no variant"), "worker joined"
    for now in (0.0, 1.0):
        asked = ask(asking, now)
        assert (asked.problem, asked.error, asking.error) == (None, "no variant", "no variant")
    assert asking.due(2.0, SEEN) == "worker joined"
    brain.fails = None
    plan(asking, 2.0)
    assert asking.error is None
    assert [(line.at, line.error) for line in lines] == [(0.0, "no variant")]


def test_after_a_failure_the_last_plan_holds_and_news_wait():
    lines = []
    brain, asking = asking_of(log=lines.append)
    plan(asking, 0.0)
    asking.interval_s = 20.0
    brain.news = "demand changed"
    asking.failed(ask(asking, 3.0), RuntimeError("licence"), took_s=0.5)
    assert asking.error == "planning failed: RuntimeError: licence"
    assert len(brain.adopted) == 1
    told = [asking.due(now, SEEN) for now in (4.0, 12.9, 13.0, 23.0)]
    assert told == ["", "", "tried again", "period"]
    (line,) = lines
    assert (line.at, line.error, line.took_s) == (3.0, asking.error, 0.5)
    plan(asking, 13.0)
    assert (asking.error, asking.due(14.0, SEEN)) == (None, "demand changed")


def test_a_problem_that_cannot_be_made_is_a_failure_too():
    brain, asking = asking_of()
    plan(asking, 0.0)
    brain.fails, brain.news = KeyError("m"), "demand changed"
    assert ask(asking, 3.0).error == asking.error == "planning failed: KeyError: 'm'"
    assert [asking.due(now, SEEN) for now in (4.0, 12.9, 13.0)] == ["", "", "period"]


def test_answers_are_logged_with_what_they_change():
    lines = []
    brain, asking = asking_of(log=lines.append)
    brain.outcome = lambda: {"assignments": [{"variant": "v", "batch_size": 1, "workers": 2}]}
    brain.target = {"cpu": 2}.get
    for at, took_s in ((0.0, 0.5), (10.0, 0.25)):
        asking.note(*plan(asking, at), {"w": "v"}, took_s)
    brain.verdict = Verdict("infeasible", holds=True)
    asking.note(*plan(asking, 20.0), {"w": "v"}, 0.25)
    told = {"trigger": "because", "demand": 2.0, "inputs": {"workers": {"cpu": 1}}}
    plans = {"targets": {"cpu": 2}, "plan": brain.outcome(), "workers": {"w": "v"}, "why": "so"}
    news = ["cpu: – → 2 workers", "v: 0 → 2 workers"]
    assert lines == [
        Planned(0.0, **told, **plans, changes=news, took_s=0.5),
        Planned(10.0, **told, **plans, changes=[], took_s=0.25),
        Planned(20.0, **told, error="infeasible", took_s=0.25),
    ]


def test_a_first_plan_is_told_against_what_runs_already():
    lines = []
    brain, asking = asking_of(log=lines.append)
    brain.target = {"cpu": 2}.get
    serves = WorkerSays("w", "cpu", assigned=(Assigned("v", 4),))
    there = Seen({"w": serves}, avoided={("x", "cpu")})
    asked = ask(asking, 0.0, there)
    asking.note(asked, asking.adopt(asked, None), {})
    assert asked.inputs["avoided"] == ["x@cpu"]
    assert lines[0].changes == ["cpu: 1 → 2 workers", "v: 1 → 0 workers"]
