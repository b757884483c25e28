"""The planner's actor, without Ray: its answers to workers and frontends, also after failures."""

import asyncio
import contextlib
import time

import pytest

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.core.policy import Expected
from ray_slo.errors import ConfigError
from ray_slo.planning.brains.brain import Counts, FrontendSays, WorkerSays
from ray_slo.planning.brains.streams import Stream
from ray_slo.record.plans import read
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.planner.actor import Pace, Planner
from tests.serve import clock

SOLVES_S = 0.01
PROFILES = {
    variant: LatencyProfile([seconds])
    for variant, seconds in {"det": 0.02, "large": 0.05, "small": 0.01}.items()
}


def spec_of(**changes):
    def variants(**accuracies):
        return {v: {"load": "apps:Network", "accuracy": a} for v, a in accuracies.items()}

    name = {"callable": "apps:Named", "parent": "detect", "variants": variants(large=90, small=70)}
    return parse_spec(
        {
            "pipeline": {
                "latency_slo_ms": 1000,
                "tasks": {
                    "detect": {"callable": "apps:Named", "variants": variants(det=90)},
                    "name": name,
                },
            },
            "workers": {"default": {"max_replicas": 4}},
            "planner": {
                "name": "loki",
                "interval_s": 3600,
                "rates": {"detect": 10},
                "kwargs": {"headroom_quantile": None, "batch_sizes": [1]},
            },
            **changes,
        }
    )


class Cluster:
    """Workers that do at once what they are told, and one frontend."""

    def __init__(self, spec, *workers):
        self.spec, self.had, self.fails = spec, {}, {}
        self.workers = {w: self.new(w) for w in workers}
        self.requests, self.ran = 0, 0  # of clients, and workers that an earlier planner had

    def new(self, name, **says):
        return WorkerSays(name, "default", version=self.spec.fingerprint, **says)

    async def round(self, actor):
        says = FrontendSays("f", Counts({"pipeline": self.requests}), self.spec.fingerprint)
        says = says._replace(running={"default": self.ran}, at=time.monotonic())
        await actor.frontend(says)
        for name, says in self.workers.items():
            token, wanted = await actor.worker(says, self.had.get(name))
            if wanted is None:
                continue
            self.had[name] = token
            loaded = frozenset(v for v in wanted.keep if v not in self.fails)
            self.workers[name] = says._replace(
                loaded=loaded,
                assigned=wanted.assigned,
                profiles={**says.profiles, **{v: PROFILES[v] for v in loaded}},
                errors={v: self.fails[v] for v in wanted.keep if v in self.fails},
            )

    async def until(self, actor, condition):
        end = time.monotonic() + 10
        while time.monotonic() < end:
            await self.round(actor)
            if condition(status := await actor.status()):
                return status
        raise AssertionError(status)

    async def settle(self, actor):
        return await self.until(actor, lambda status: status["state"] == "planned")

    @property
    def does(self):
        return {w: s.assigned[0].variant if s.assigned else None for w, s in self.workers.items()}


async def here(function, problem):
    await asyncio.sleep(SOLVES_S)
    return function(problem)


async def broken(function, problem):
    await asyncio.sleep(SOLVES_S)
    raise RuntimeError("the solver broke")


@contextlib.contextmanager
def actor_of(spec, aside=here, **pace):
    often = {"poll_s": 0.02, "report_s": 0.02, "step_s": 0.01, "gap_s": 0.05}
    actor = Planner(spec, "app#frontend", aside, Pace(**{**often, **pace}))
    try:
        yield actor
    finally:
        actor.close()


def test_from_the_first_worker_to_a_plan():
    async def scenario():
        spec = spec_of()
        cluster = Cluster(spec, "a", "b")
        with actor_of(spec) as actor:
            assert await actor.target("default", 4) is None
            await cluster.round(actor)
            assert cluster.workers["a"].loaded == set(PROFILES)  # to be measured
            assert cluster.does == {"a": None, "b": None}
            status = await cluster.settle(actor)
            assert await actor.target("default", 4) == 2
            assert sorted(cluster.does.values()) == ["det", "large"]
            assert status["targets"] == status["running"] == {"default": 2}
            assert status["error"] is None
            assert "Hardware scaling" in status["why"]
            says = FrontendSays("f", Counts(), spec.fingerprint)
            heard = await actor.frontend(says._replace(client="g"))
            assert 0 <= heard.plan_age_s < 10
            assert heard.replicas == {"default": (2, 2)}
            assert heard.profiles == {(v, "default"): profile for v, profile in PROFILES.items()}
            assert (await actor.frontend(says._replace(client="g"))).profiles is None

    clock.run(scenario())


def test_a_change_of_demand_is_planned_for_before_the_interval_is_over():
    async def scenario():
        spec = spec_of()
        cluster = Cluster(spec, "a", "b")
        with actor_of(spec) as actor:
            actor.planning.brain.counted(
                time.monotonic() - 30, 0.1, Counts({"pipeline": 1})
            )  # it has listened a while
            await cluster.settle(actor)
            cluster.requests = 40
            status = await cluster.until(actor, lambda status: status["targets"]["default"] == 3)
            assert 15 < status["demand"] <= 45
            assert status["plans"] >= 2  # and the interval is an hour

    clock.run(scenario())


def test_a_dry_run_says_what_it_would_do_and_does_nothing(monkeypatch):
    async def scenario():
        spec = spec_of()
        cluster = Cluster(spec, "a", "b")
        with actor_of(spec, gap_s=3600) as actor:  # it does not plan itself
            with pytest.raises(ConfigError, match="no worker is there yet"):
                await actor.dry_run()
            before = await cluster.settle(actor)
            same = await actor.dry_run()
            assert same["replicas"] == {"default": {"running": 2, "target": 2, "would": 2}}
            assert all(w["does"] == w["would"] and not w["load"] for w in same["workers"].values())
            # What is heard fades.
            monkeypatch.setattr(Stream, "rate", lambda *_: 60.0)
            would = await actor.dry_run()
            assert would["replicas"] == {"default": {"running": 2, "target": 2, "would": 4}}
            assert "Accuracy scaling" in would["why"]
            assert would["why_in_force"] == before["why"]
            does, wanted = (
                {a["variant"] for w in would["workers"].values() for a in w[k]}
                for k in ("does", "would")
            )
            assert (does, wanted) == ({"det", "large"}, {"det", "small"})
            await cluster.round(actor)
            after = await actor.status()
            for key in ("plans", "why", "targets", "workers", "assignments"):
                assert after[key] == before[key]
            actor.aside = broken
            with pytest.raises(ConfigError, match="planning failed: RuntimeError: the solver"):
                await actor.dry_run()

    clock.run(scenario())


def test_a_failing_solver_leaves_the_plan_and_is_tried_again():
    async def scenario():
        spec = spec_of()
        cluster = Cluster(spec, "a", "b")
        with actor_of(spec) as actor:
            plans = (await cluster.settle(actor))["plans"]
            before = cluster.does
            actor.aside = broken
            await actor.replan()
            await cluster.round(actor)
            status = await actor.status()
            assert status["error"] == "planning failed: RuntimeError: the solver broke"
            heard = await actor.frontend(FrontendSays("f", Counts(), spec.fingerprint))
            assert heard.plans[1:3] == (status["plans"], status["failures"]) == (plans, 1)
            assert heard.plans.took_s == pytest.approx(SOLVES_S)
            assert (cluster.does, await actor.target("default", 4)) == (before, 2)
            actor.aside = here
            await asyncio.sleep(9.0)  # long before the interval is over
            await cluster.until(actor, lambda status: status["error"] is None)

    clock.run(scenario())


def test_the_status_says_how_old_the_plan_and_the_last_attempt_are():
    async def scenario():
        spec = spec_of()
        cluster = Cluster(spec, "a", "b")
        with actor_of(spec, gap_s=3600) as actor:  # it does not plan itself
            assert (await actor.status())["last_tried_s"] is None
            status = await cluster.settle(actor)
            ages = [status["plan_age_s"], status["last_tried_s"]]
            await asyncio.sleep(3.0)
            actor.aside = broken
            await actor.replan()
            await asyncio.sleep(2.0)
            status = await actor.status()
            assert status["last_tried_s"] == pytest.approx(SOLVES_S + 2.0)
            assert status["plan_age_s"] == pytest.approx(ages[0] + 3.0 + SOLVES_S + 2.0)
            assert ages[1] == pytest.approx(ages[0] + SOLVES_S)  # it counts from its beginning

    clock.run(scenario())


def test_without_any_plan_every_worker_serves_everything():
    async def scenario():
        spec = spec_of()
        cluster = Cluster(spec, "a", "b")
        with actor_of(spec, broken) as actor:
            await cluster.until(actor, lambda status: status["error"] is not None)
            await cluster.round(actor)
            assert cluster.does == {"a": None, "b": None}
            assert {w.loaded for w in cluster.workers.values()} == {frozenset(PROFILES)}
            assert await actor.target("default", 4) is None

    clock.run(scenario())


def test_a_successor_changes_nothing_until_it_has_listened():
    async def scenario():
        spec = spec_of()
        cluster = Cluster(spec, "a", "b")
        for name, variant in (("a", "large"), ("b", "det")):
            cluster.workers[name] = cluster.new(
                name,
                loaded=frozenset([variant]),
                assigned=(Assigned(variant, 1),),
                profiles=PROFILES,  # of all that it ever ran
            )
        before = dict(cluster.workers)
        with actor_of(spec) as actor:
            await cluster.round(actor)
            assert (await actor.status())["state"] == "taken over"
            assert cluster.workers == before
            assert await actor.target("default", 4) is None
            status = await cluster.settle(actor)
            assert cluster.does == {"a": "large", "b": "det"}
            assert status["targets"] == {"default": 2}

    clock.run(scenario())


@pytest.mark.parametrize("returns_s", [5.0, 20.0])
def test_a_successor_waits_for_a_worker_that_reports_later(returns_s):
    async def scenario():
        spec = spec_of()
        cluster = Cluster(spec)
        cluster.ran = 2
        for name, variant in (("a", "large"), ("b", "det")):
            does = {"loaded": frozenset([variant]), "assigned": (Assigned(variant, 1),)}
            cluster.workers[name] = cluster.new(name, profiles=PROFILES, **does)
        late = cluster.workers.pop("b")
        with actor_of(spec) as actor:
            began = time.monotonic()
            while time.monotonic() < began + returns_s:
                await cluster.round(actor)
            # Some workers never return.
            assert (actor.planning.planned_at is not None) == (returns_s > 12.0)
            cluster.workers["b"] = late
            status = await cluster.until(actor, lambda s: s["plans"] and len(s["workers"]) == 2)
            assert status["targets"] == {"default": 2}
            if returns_s < 12.0:
                assert cluster.does == {"a": "large", "b": "det"}
                assert cluster.workers["a"].loaded == {"large"}

    clock.run(scenario())


def test_a_successor_hears_from_frontends_what_no_worker_knows():
    async def scenario():
        spec = spec_of()
        cluster = Cluster(spec, "a", "b")
        with actor_of(spec) as actor:
            told = {(v, "default"): profile for v, profile in PROFILES.items()}
            await actor.frontend(FrontendSays("f", Counts(), spec.fingerprint, {}, told))
            await cluster.round(actor)
            assert cluster.does == {"a": None, "b": None}  # nothing is to be measured
            await cluster.settle(actor)
            assert sorted(cluster.does.values()) == ["det", "large"]

    clock.run(scenario())


def test_serve_says_how_many_there_may_be():
    async def scenario():
        spec = spec_of()
        cluster = Cluster(spec, "a", "b")
        with actor_of(spec) as actor:
            await cluster.settle(actor)
            await actor.target("default", 1)  # redeployed with another max_replicas
            status = await cluster.until(actor, lambda s: s["targets"] == {"default": 1})
            assert status["error"].endswith("has one variant, so workers share")
            assert await actor.target("default", 1) == 1

    clock.run(scenario())


def test_what_cannot_be_loaded_is_avoided_for_a_while():
    async def scenario():
        spec = spec_of()
        cluster = Cluster(spec, "a", "b")
        cluster.fails = {"large": ("no memory", 1.0)}
        with actor_of(spec, avoid_s=5.0) as actor:
            status = await cluster.until(actor, lambda s: s["state"] == "planned" and s["plans"])
            assert sorted(cluster.does.values()) == ["det", "small"]
            assert status["load_errors"] == {"large on default": "no memory"}
            heard = await actor.frontend(FrontendSays("f", Counts(), spec.fingerprint))
            assert heard.shortfall is None  # there is a plan without it
            cluster.fails = {}
            await cluster.until(actor, lambda _: sorted(cluster.does.values()) == ["det", "large"])

    clock.run(scenario())


def test_the_last_variant_of_a_task_cannot_be_avoided():
    async def scenario():
        spec = spec_of()
        cluster = Cluster(spec, "a", "b")
        cluster.fails = {"det": ("no memory", 1.0)}
        with actor_of(spec) as actor:
            status = await cluster.until(actor, lambda status: status["error"] is not None)
            assert "no variant of detect can be loaded" in status["error"]
            heard = await actor.frontend(FrontendSays("f", Counts(), spec.fingerprint))
            assert heard.shortfall == f"{status['error']}; no memory"
            with pytest.raises(ConfigError, match="no variant of detect"):
                await actor.replan()

    clock.run(scenario())


def test_workers_that_leave_or_are_silent_are_done_without():
    async def scenario():
        spec = spec_of()
        cluster = Cluster(spec, "a", "b", "c", "d")
        with actor_of(spec, gone_s=1.0) as actor:
            await cluster.settle(actor)
            useful = [w for w, variant in cluster.does.items() if variant]
            await actor.leave(useful[0])
            del cluster.workers[useful[0]]
            await cluster.settle(actor)
            assert sorted(v for v in cluster.does.values() if v) == ["det", "large"]
            del cluster.workers[useful[1]]
            await cluster.until(actor, lambda status: status["running"] == {"default": 2})
            await cluster.settle(actor)
            assert sorted(cluster.does.values()) == ["det", "large"]

    clock.run(scenario())


def test_a_newer_release_starts_afresh_and_older_workers_go_on():
    async def scenario():
        spec = spec_of().stamped("one")
        cluster = Cluster(spec, "a", "b")
        with actor_of(spec) as actor:
            await cluster.settle(actor)
            newer = spec_of().stamped("two").model_copy(update={"version": spec.version + 1})
            await actor.configure(newer)
            assert await actor.target("default", 4) is None
            assert await actor.worker(cluster.workers["a"], None) == (None, None)
            await cluster.settle(renewed(cluster, newer, actor))
            assert await actor.target("default", 4) == 2
            await actor.configure(spec)  # by a frontend of the older release
            assert await actor.target("default", 4) == 2

    def renewed(cluster, spec, actor):
        cluster.spec, cluster.had = spec, {}
        cluster.workers = {w: cluster.new(w) for w in ("c", "d")}
        return actor

    clock.run(scenario())


def test_a_setting_that_replicas_need_not_know_counts_from_the_next_plan_on():
    async def scenario():
        spec = spec_of().stamped("one")
        cluster = Cluster(spec, "a", "b")
        with actor_of(spec) as actor:
            await cluster.settle(actor)
            assert await actor.target("default", 4) == 2
            planner = spec.planner.model_copy(update={"rates": {"pipeline": 30}})
            changes = {"planner": planner, "version": spec.version + 1}
            planning = actor.planning
            await actor.configure(spec.model_copy(update=changes))
            assert actor.planning is planning
            await actor.replan()
            assert await actor.target("default", 4) == 3  # 30 take 1.5 workers with "large"

    clock.run(scenario())


def test_only_what_is_new_is_counted():
    before = Counts({"detect": 10}, {"v": 4}, {"v": {"child": 8}}, {"m": {3: 10}})
    now = Counts(
        {"detect": 15},
        {"v": 5, "w": 1},
        {"v": {"child": 10}, "w": {"child": 1}},
        {"m": {3: 12, 4: 3}},
        {"detect@gold": 2},
    )
    assert now.since(before) == Counts(
        {"detect": 5},
        {"v": 1, "w": 1},
        {"v": {"child": 2}, "w": {"child": 1}},
        {"m": {3: 2, 4: 3}},
        {"detect@gold": 2},
    )
    assert before.since(now).requests == {}  # a frontend that started anew


def test_what_was_planned_and_why_is_logged(tmp_path):
    async def scenario():
        spec = spec_of(decision_log={"dir": str(tmp_path), "flush_s": 0.05})
        cluster = Cluster(spec, "a", "b")
        with actor_of(spec) as actor:
            actor.planning.brain.counted(time.monotonic() - 30, 0.1, Counts({"pipeline": 1}))
            await cluster.settle(actor)
            cluster.requests = 40
            await cluster.until(actor, lambda status: status["targets"]["default"] > 2)
            actor.aside = broken
            await actor.replan()
            actor.aside = here
            says = FrontendSays(
                "f", Counts({"pipeline": 40}), spec.fingerprint, clocks={"elsewhere": 1e6}
            )
            await actor.frontend(says)
            await actor.replan()
            actor.planning.log.close(20.0)

    clock.run(scenario())
    (planner,) = read(tmp_path)
    first, *more, failed, asked = planner.plans
    assert first.trigger == "first plan"
    assert "default: – → 2 workers" in first.changes
    assert first.inputs["workers"] == {"default": 2}
    rise = next(p for p in more if p.changes)
    assert rise.trigger == "demand changed"
    assert rise.demand > first.demand
    assert rise.targets["default"] > 2
    assert rise.took_s == pytest.approx(SOLVES_S)
    assert set(rise.workers) == {"a", "b"}
    assert "req/s on" in rise.why
    assert failed.trigger == asked.trigger == "asked for"
    assert failed.error == "planning failed: RuntimeError: the solver broke"
    assert (failed.plan, failed.changes, failed.clocks) == ({}, (), {})
    assert not asked.error
    assert asked.clocks["elsewhere"] == pytest.approx(1e6 - asked.at, abs=60)
    assert planner.shift("elsewhere", asked.at) == asked.clocks["elsewhere"]


def due(actor, now):
    return actor.planning.asking.due(now, actor.planning.heard.seen())


def test_what_changed_is_said_rather_than_that_it_was_time_anyway(monkeypatch):
    async def scenario():
        spec = spec_of()
        cluster = Cluster(spec, "a", "b")
        with actor_of(spec) as actor:
            await cluster.settle(actor)
            monkeypatch.setattr(actor.planning.brain, "due", lambda now, seen: reasons[0])
            later = time.monotonic() + 3600
            for reasons in ([""], ["arguments changed"]):
                assert due(actor, later) == (reasons[0] or "period")
            actor.aside = broken  # what changed since then may not be why
            await actor.replan()
            later = time.monotonic() + 3600
            assert due(actor, later) == "period"

    clock.run(scenario())


def test_a_successors_first_plan_is_told_against_what_runs(tmp_path):
    async def scenario():
        spec = spec_of(decision_log={"dir": str(tmp_path), "flush_s": 0.05})
        cluster = Cluster(spec, "a", "b")
        for _ in range(2):
            with actor_of(spec) as actor:
                await cluster.settle(actor)
                actor.planning.log.close(20.0)

    clock.run(scenario())
    before, after = sorted(read(tmp_path), key=lambda planner: planner.plans[0].at)
    assert before.plans[0].trigger == "first plan"
    assert len(before.plans[0].changes) == 3
    assert after.plans[0].trigger == "planner restarted"
    assert after.plans[0].targets == {"default": 2}
    assert after.plans[0].changes == ()


def test_no_accuracy_is_predicted_for_networks_whose_accuracy_is_unknown(monkeypatch):
    plain = {"callable": "apps:Plain", "latency_slo_ms": 100}
    spec = parse_spec(
        {
            "models": {"known": {**plain, "accuracy": 80}, "unknown": plain},
            "workers": {"w": {"max_replicas": 2}},
        }
    )
    with actor_of(spec) as actor:
        brain = type(actor.planning.brain)
        said = {"known": Expected(80.0, 0.1), "unknown": Expected(100.0, 0.2)}
        monkeypatch.setattr(brain, "expected", said)
        told = actor.planning.answer("f").expected
    assert told == {"known": Expected(80.0, 0.1), "unknown": Expected(None, 0.2)}
