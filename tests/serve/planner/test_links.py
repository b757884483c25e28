"""A worker that follows the plan: the order in which it loads, reports and unloads. And the reports
of a frontend."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.errors import ConfigError
from ray_slo.planning.brains.brain import (
    Counts,
    FrontendHears,
    FrontendSays,
    Plans,
    Routing,
    Wanted,
)
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.messages import WorkerMemory
from ray_slo.serve.planner import links
from ray_slo.serve.planner.actor import Planner
from ray_slo.serve.planner.links import Follower, FrontendLink
from tests.serve import clock

OLD, NEW = Wanted((Assigned("large", 2),), ("large",)), Wanted((Assigned("small", 4),), ("small",))


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


class Link:
    """Stands in for the way to a planner, which gives these answers, one at a time.

    Attributes:
        heard: what it was told.
    """

    def __init__(self, *answers, else_says):
        self.answers, self.else_says, self.heard = list(answers), else_says, []

    @property
    def actor(self):
        raise ConnectionError("it cannot be reached")

    async def ask(self, method, says, *had):
        self.heard.append(says)
        await asyncio.sleep(0.1)
        answer = self.answers.pop(0) if self.answers else self.else_says
        if isinstance(answer, Exception):
            raise answer
        return answer


class Direct:
    """The way to a planner in this process."""

    def __init__(self, planner):
        self._planner = planner

    @property
    def actor(self):
        return self

    def __getattr__(self, method):
        return SimpleNamespace(remote=getattr(self._planner, method))

    async def ask(self, method, *said):
        return await getattr(self._planner, method)(*said)


class Worker:
    """Keeps a diary."""

    def __init__(self, *broken, id="w"):
        self.id = id
        self.broken = set(broken)
        self.offered = self.announced = frozenset()
        self.registration = self
        self.assigned, self.profiles = (), {}
        self.diary = []
        self.memory = WorkerMemory("gpu", 900.0, {"large": (100.0, 20.0, 8)})

    async def load(self, variants, known):
        (key,) = variants
        if key in self.broken:
            raise MemoryError(f"no room for {key}")
        self.diary.append(f"load {key}" + (f" {known[key].table}" if key in known else ""))
        self.offered |= {key}
        self.announced = self.offered

    async def join(self, link):
        self.diary.append("join")

    async def assign(self, assigned):
        self.diary.append(f"do {assigned[0].variant}" if assigned else "do nothing")
        self.assigned = assigned

    async def unload(self, variants):
        self.diary += [f"unload {key}" for key in sorted(variants)]
        self.offered -= set(variants)
        self.announced = self.offered

    def check_slo(self):
        self.diary.append("check")

    def will_load(self, variants):
        """For those who wait."""


def follow(worker, *wanted, first=False, **planner):
    follower = Follower(spec_of(**planner), "app#frontend", "default", worker)

    async def scenario():
        for w in wanted:
            await (follower.first(w) if first else follower.do(w))

    clock.run(scenario())
    return follower.says()


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


@pytest.mark.parametrize("mb, breaks", [(780.0, False), (781.0, True)])
def test_break_before_make_where_there_is_no_memory_for_both(mb, breaks):
    worker = Worker()
    says = follow(worker, OLD, NEW._replace(memory_mb={"small": mb}))
    first = ["do nothing", "unload large", "load small", "do small"]
    made = ["load small", "do small", "unload large"]
    assert worker.diary[2:] == (first if breaks else made)
    assert (says.memory_mb, says.room_mb) == ({"large": 120.0}, 900.0)


def test_doing_it_again_does_nothing_and_a_known_profile_is_taken():
    worker = Worker()
    follow(worker, OLD._replace(profiles={"large": LatencyProfile([0.5])}), OLD)
    assert worker.diary == ["load large [0.5]", "do large"]


def test_what_cannot_be_loaded_leaves_what_there_is_and_is_tried_again_later():
    worker = Worker("small")
    follower = Follower(spec_of(), "app#frontend", "default", worker)

    async def scenario():
        for wanted in (OLD, NEW, NEW):
            await follower.do(wanted)
        assert worker.diary == ["load large", "do large"]
        assert follower.says().errors == {"small": ("MemoryError: no room for small", 1.0)}
        await asyncio.sleep(20.0)
        await follower.do(NEW)
        assert follower.says().errors["small"][1] == 2.0  # another failure
        await follower.do(OLD)
        assert follower.says().errors == {}  # it is not asked for any more

    clock.run(scenario())


def test_a_worker_that_cannot_serve_a_task_at_first_ends():
    everything = Wanted((), ("det", "large", "small"))
    worker = Worker("small")
    follow(worker, everything, first=True)
    assert worker.diary == ["load det", "load large", "check"]
    with pytest.raises(MemoryError, match="no room for det"):
        follow(Worker("det"), everything, first=True)
    follow(Worker("large"), OLD, first=True)  # the plan will do without


def test_a_worker_that_cannot_load_its_share_of_a_task_waits_for_other_orders():
    """Another worker may have another variant of that task."""
    worker = Worker("large")
    link = Link(
        ("1", Wanted((), ("det", "large"))), ("2", Wanted((), ("det",))), else_says=(None, None)
    )
    follower = Follower(spec_of(), "app#frontend", "default", worker, link)
    clock.run(follower.begin())
    assert worker.diary == ["load det", "check"]
    assert any("large" in says.errors for says in link.heard)


def test_a_worker_joins_a_group_with_what_it_has_loaded_and_leaves_it_for_another():
    models = {m: {"callable": "apps:Tasks", "latency_slo_ms": 500} for m in "lmn"}
    spec = parse_spec({"models": models, "planner": {"name": "herd"}})
    worker = Worker("n")
    follower = Follower(spec, "app#frontend", "default", worker)

    async def scenario():
        with pytest.raises(MemoryError):
            await follower.first(Wanted((), ("l", "n"), group="a"))
        await follower.first(Wanted((), ("l", "m"), group="a"))
        assert follower.says().group == "a"
        worker.diary.clear()
        await asyncio.sleep(20.0)
        await follower.do(Wanted((), ("n", "m"), group="b"))
        assert worker.diary == ["join", "unload l"]
        assert follower.says().errors == {"n": ("MemoryError: no room for n", 2.0)}

    clock.run(scenario())


class Channel:
    """A scheduler's, with a clock that is ahead; and a router."""

    routes, queued = {"m": "a"}, {("m", "a"): 2}

    def __init__(self):
        self.told = []

    async def clocks(self):
        return {"elsewhere": time.monotonic() + 50}

    async def status(self):
        return {"queued": {}, "groups": {"a": {"queued": {"m": 2}}}}

    def route(self, routing):
        self.told.append(routing)
        self.routes = routing.routes


def test_a_frontend_counts_and_reminds_a_new_planner(monkeypatch):
    planned = []
    monkeypatch.setattr(links.PlanMetrics, "planned", lambda self, p: planned.append(p))
    plan = FrontendHears(3.0, {"default": (3, 2)}, {("v", "k"): [0.1]}, Plans("e", 2), epoch="e")
    link = Link(plan, ConnectionError("it died"), else_says=FrontendHears(None, epoch="f"))

    async def scenario():
        reporter = FrontendLink(spec_of(), "app#frontend", "f", Channel(), link=link)
        reporter.arrived("pipeline")
        reporter.arrived("pipeline@gold", 4)
        reporter.sized("det", 1)
        reporter.sized("det", 7)
        reporter.bad("pipeline", 2)
        reporter.waits("pipeline@gold", 3)
        reporter.waits("pipeline@gold", -1)
        reporter.finished("det", {"name": 3})
        reporter.finished("large")
        reporter.tune({"budget_per_hour": 2})
        await asyncio.sleep(1.0)
        status = await reporter.status()
        assert status["plan"]["state"] == "unreachable"
        assert status["plan"]["why"] == "the last plan holds"
        assert 3 <= status["plan"]["plan_age_s"] < 10
        with pytest.raises(ConnectionError):
            await reporter.replan()
        reporter.close()

    clock.run(scenario())
    counts = Counts(
        {"pipeline": 1, "pipeline@gold": 4},
        {"det": 1, "large": 1},
        {"det": {"name": 3}},
        {"det": {1: 1, 7: 1}},
        {"pipeline": 2},
        {"pipeline@gold": 2},
    )
    assert planned[:2] == [Plans("e", 2), Plans()]
    first = link.heard[0]._replace(at=0.0)
    assert first == FrontendSays("f", counts, "", {"budget_per_hour": 2}, {})
    assert [says.profiles for says in link.heard[:4]] == [{}, {}, {("v", "k"): [0.1]}, {}]
    assert [says.applied for says in link.heard[:4]] == [("", -1), ("e", 0), ("e", 0), ("f", 0)]
    # A planner that has no plan yet does not know how many workers there are.
    assert [says.running for says in link.heard[:5]] == [{}, *[{"default": 2}] * 4]


def test_a_frontend_goes_by_routes_and_tells_what_waits_and_what_time_schedulers_have(tmp_path):
    routing = Routing(3, {"m": "b"}, ("a", "b"), True)
    link = Link(else_says=FrontendHears(1.0, epoch="e", routing=routing))
    model = {"callable": "apps:Tasks", "latency_slo_ms": 500}
    spec = parse_spec(
        {
            "models": {"m": model},
            "groups": {"a": {"models": ["m"]}, "b": {}},
            "decision_log": str(tmp_path),
        }
    )

    async def scenario():
        channel = Channel()
        reporter = FrontendLink(spec, "app#frontend", "f", channel, channel, link)
        await asyncio.sleep(1.0)
        reporter.close()
        says = link.heard[-1]
        assert (says.applied, says.routes, says.queued) == (("e", 3), {"m": "b"}, {("m", "a"): 2})
        assert says.clocks["elsewhere"] == pytest.approx(time.monotonic() + 50, abs=1)
        assert channel.told[0] == routing
        status = await reporter.status()
        assert status["groups"] == {"a": {"queued": {"m": 2}}}

    clock.run(scenario())


def test_a_moved_model_is_unloaded_when_no_frontend_has_requests_of_it_left_there():
    model = {"callable": "apps:Tasks", "latency_slo_ms": 500}
    groups = {"a": {"models": ["l"]}, "b": {"models": ["m"]}}
    spec = parse_spec({"models": {"l": model, "m": model}, "groups": groups})
    old, new = Worker(id="old"), Worker(id="new")

    async def scenario():
        link = Direct(planner := Planner(spec, "app#frontend"))
        channel = Channel()
        channel.routes, channel.queued = {}, {}
        frontend = FrontendLink(spec, "app#frontend", "f", channel, channel, link)
        followers = [
            Follower(spec, "app#frontend", kind, worker, link)
            for kind, worker in (("a", old), ("b", new))
        ]
        await asyncio.gather(*(follower.begin() for follower in followers))
        assert (old.offered, new.offered) == ({"l"}, {"m"})
        following = [asyncio.ensure_future(follower.follow()) for follower in followers]
        await asyncio.sleep(3.0)
        assert channel.routes == {"l": "a", "m": "b"}
        channel.queued = {("l", "a"): 2}
        new.broken = {"l"}
        await frontend.move("l", "b")
        await asyncio.sleep(15.0)
        status = await frontend.status()
        assert status["plan"]["load_errors"] == {"l on new": "MemoryError: no room for l"}
        assert channel.routes["l"] == "a"  # where it is loaded
        new.broken = set()
        await asyncio.sleep(30.0)
        assert channel.routes == {"l": "b", "m": "b"}
        assert old.offered == {"l"}  # two requests wait there
        assert (await frontend.status())["groups"]["a"]["draining"] == ["l"]
        channel.queued = {}
        await asyncio.sleep(3.0)
        assert (old.offered, new.offered) == (set(), {"l", "m"})
        assert (await frontend.status())["plan"]["state"] == "settled"
        for task in following:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        frontend.close()
        planner.close()

    clock.run(scenario())


def test_a_budget_is_checked_before_it_is_told():
    from ray_slo.serve.planner.plugin import make_brain

    spec = parse_spec(
        {
            "models": {"rank": {"callable": "apps:Tasks", "latency_slo_ms": 100}},
            "workers": {"w": {"instance_type": {"price_per_hour": 1.0}}},
            "planner": {"name": "kairos", "kwargs": {"budget_per_hour": 3}},
        }
    )
    with pytest.raises(ValueError, match="money"):
        make_brain(spec).tune({"money": 3})
    with pytest.raises(ConfigError, match="user_config of a frontend"):
        from ray_slo.serve.frontend.frontend import Frontend

        frontend = object.__new__(Frontend)
        frontend._spec = spec
        frontend.reconfigure({"budget_per_hour": 3})


def test_arguments_that_change_are_told_as_the_planner_takes_them():
    from ray_slo.serve.frontend.frontend import Frontend

    frontend, told = object.__new__(Frontend), []
    frontend._spec = parse_spec(
        {
            "models": {"rank": {"callable": "apps:Tasks", "latency_slo_ms": 100}},
            "workers": {"w": {"max_replicas": 2, "price_per_hour": 1.0}},
            "planner": {"name": "auto", "kwargs": {"budget_per_hour": 3}},
        }
    )
    frontend._plan = SimpleNamespace(tune=told.append, close=lambda: None)
    frontend.reconfigure({"planner": {"budget_per_hour": 2, "batch_sizes": [1, 2]}})
    assert told == [{"budget_per_hour": 2.0, "batch_sizes": (1, 2)}]
    for wrong in ({"budget": 2}, {"budget_per_hour": -1}):
        with pytest.raises(ConfigError, match=r"user_config\.planner\.kwargs\.budget"):
            frontend.reconfigure({"planner": wrong})
