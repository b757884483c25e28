"""A worker that follows the plan: in which order it loads, tells and unloads; and what a frontend
tells."""

import asyncio

import pytest

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.errors import ConfigError
from ray_slo.planning.brains.brain import Counts, FrontendHears, FrontendSays, Plans, Wanted
from ray_slo.serve.config.spec import parse_spec
from ray_slo.serve.planner import plan_channel
from ray_slo.serve.planner.app_actor import AppActorLink
from ray_slo.serve.planner.plan_channel import PlanFollower, PlanReporter
from tests.serve import clock

OLD, NEW = Wanted(Assigned("large", 2), ("large",)), Wanted(Assigned("small", 4), ("small",))


def spec_of(**planner):
    def variants(*names):
        return {v: {"load": "apps:Network", "accuracy": 90} for v in names}

    name = {"callable": "apps:Named", "parent": "detect", "variants": variants("large", "small")}
    detect = {"callable": "apps:Named", "variants": variants("det")}
    tasks = {"detect": detect, "name": name}
    return parse_spec(
        {
            "pipeline": {"latency_slo_ms": 1000, "tasks": tasks},
            "planner": {"name": "loki", **planner},
        }
    )


class Worker:
    """Keeps a diary."""

    id = "w"

    def __init__(self, *broken):
        self.broken = set(broken)
        self.offered, self.assigned, self.profiles = frozenset(), None, {}
        self.diary = []

    async def load(self, variants, known):
        (key,) = variants
        if key in self.broken:
            raise MemoryError(f"no room for {key}")
        self.diary.append(f"load {key}" + (f" {known[key].table}" if key in known else ""))
        self.offered |= {key}

    async def assign(self, assigned):
        self.diary.append(f"do {assigned.variant}" if assigned else "do nothing")
        self.assigned = assigned

    async def unload(self, variants):
        self.diary += [f"unload {key}" for key in sorted(variants)]
        self.offered -= set(variants)

    def check_slo(self):
        self.diary.append("check")

    def will_load(self, variants):
        """For those who wait."""


def follow(worker, *wanted, first=False, **planner):
    follower = PlanFollower(spec_of(**planner), "app#frontend", "default", worker)

    async def scenario():
        for w in wanted:
            await (follower._first(w) if first else follower._do(w))

    clock.run(scenario())
    return follower._says()


def test_make_before_break():
    worker = Worker()
    says = follow(worker, OLD, NEW)
    assert worker.diary == ["load large", "do large", "load small", "do small", "unload large"]
    assert (says.loaded, says.assigned, says.ready) == ({"small"}, NEW.assigned, False)


def test_break_before_make():
    worker = Worker()
    follow(worker, OLD, NEW, make_before_break=False)
    diary = ["load large", "do large", "do nothing", "unload large", "load small", "do small"]
    assert worker.diary == diary


def test_doing_it_again_does_nothing_and_a_known_profile_is_taken():
    worker = Worker()
    follow(worker, OLD._replace(profiles={"large": LatencyProfile([0.5])}), OLD)
    assert worker.diary == ["load large [0.5]", "do large"]


def test_what_cannot_be_loaded_leaves_what_there_is(monkeypatch):
    worker = Worker("small")
    says = follow(worker, OLD, NEW, NEW)
    assert worker.diary == ["load large", "do large"]
    assert says.errors == {"small": ("MemoryError: no room for small", 1.0)}
    monkeypatch.setattr(plan_channel, "_RETRY_LOAD_S", 0.0)
    says = follow(worker, NEW, NEW)
    assert says.errors["small"][1] == 2.0  # another failure
    says = follow(worker, NEW, OLD)
    assert says.errors == {}  # it is not asked for any more


def test_a_worker_that_cannot_serve_a_task_at_first_ends():
    everything = Wanted(None, ("det", "large", "small"))
    worker = Worker("small")
    follow(worker, everything, first=True)
    assert worker.diary == ["load det", "load large", "check"]
    with pytest.raises(MemoryError, match="no room for det"):
        follow(Worker("det"), everything, first=True)
    follow(Worker("large"), OLD, first=True)  # the plan will do without


def test_a_worker_that_cannot_load_its_share_of_a_task_waits_for_other_orders():
    """Another worker may have another variant of that task."""
    worker = Worker("large")
    follower = PlanFollower(spec_of(), "app#frontend", "default", worker)
    orders = [Wanted(None, ("det", "large")), Wanted(None, ("det",))]
    heard = []

    async def ask():
        heard.append(follower._says())
        await asyncio.sleep(0.1)
        return orders.pop(0) if orders else None

    follower._ask = ask
    clock.run(follower.begin())
    assert worker.diary == ["load det", "check"]
    assert any("large" in says.errors for says in heard)


def test_a_frontend_counts_and_reminds_a_new_actor(monkeypatch):
    monkeypatch.setattr(plan_channel, "_REPORT_S", 0.01)
    monkeypatch.setattr(plan_channel, "AGAIN_S", 0.01)
    enough = asyncio.Event()
    heard, answers = (
        [],
        [
            FrontendHears(3.0, {"default": (3, 2)}, {("v", "k"): [0.1]}, Plans("e", 2)),
            ConnectionError("it died"),
        ],
    )

    planned = []
    monkeypatch.setattr(plan_channel.PlanMetrics, "planned", lambda self, p: planned.append(p))

    async def ask(self, method, says):
        assert method == "frontend"
        heard.append(says)
        if len(heard) == 4:
            enough.set()
        answer = answers.pop(0) if answers else FrontendHears(None)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(AppActorLink, "ask", ask)

    async def scenario():
        reporter = PlanReporter(spec_of(), "app#frontend", "f")
        reporter.arrived()
        reporter.arrived(7)
        reporter.finished("det", {"name": 3})
        reporter.finished("large")
        reporter.tune({"budget_per_hour": 2})
        await asyncio.wait_for(enough.wait(), 10)
        status = await reporter.status()
        assert status["state"] == "unreachable"
        assert status["why"] == "the last plan holds"
        assert 3 <= status["plan_age_s"] < 10
        with pytest.raises(ConnectionError):
            await reporter.replan()
        reporter.close()

    clock.run(scenario())
    counts = Counts({"": 2}, {"det": 1, "large": 1}, {"det": {"name": 3}}, {1: 1, 7: 1})
    assert planned[:2] == [Plans("e", 2), Plans()]
    assert heard[0] == FrontendSays("f", counts, "", {"budget_per_hour": 2}, {})
    assert [says.profiles for says in heard[:4]] == [{}, {}, {("v", "k"): [0.1]}, {}]


def test_a_budget_is_checked_before_it_is_told():
    from ray_slo.serve.planner.registry import make_brain

    spec = parse_spec(
        {
            "models": {"rank": {"callable": "apps:Tasks", "latency_slo_ms": 100}},
            "workers": {"w": {"instance_type": {"price_per_hour": 1.0}}},
            "planner": {"name": "kairos", "kwargs": {"budget_per_hour": 3}},
        }
    )
    with pytest.raises(ValueError, match="unknown key"):
        make_brain(spec).tune({"money": 3})
    with pytest.raises(ConfigError, match="user_config of a frontend"):
        from ray_slo.serve.frontend.frontend import Frontend

        frontend = object.__new__(Frontend)
        frontend._spec = spec
        frontend.reconfigure({"budget_per_hour": 3})
