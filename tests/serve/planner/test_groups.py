"""The planner actor without Ray: plans, errors, restarts, moves by hand, redeployments."""

import asyncio
import contextlib
import time

import pytest

from ray_slo.errors import ConfigError, UnknownModel
from ray_slo.planning.brains.brain import Counts, FrontendSays, WorkerSays
from ray_slo.record.plans import read
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.planner.actor import Pace, Planner
from tests.serve import clock

SOLVES_S = 0.01
MODEL = {"callable": "apps:Tasks", "latency_slo_ms": 500}
POOL = {
    "models": {"l": MODEL, "m": MODEL, "n": MODEL},
    "workers": {"default": {"num_replicas": 2}},
    "planner": {
        "name": "herd",
        "interval_s": 3600,
        "rates": {"l": 50},
        "memory_mb": {"l": 1, "m": 1, "n": 1},
        "kwargs": {"memory_mb": 2},
    },
}
GROUPS = {
    "models": {"l": MODEL, "m": MODEL},
    "groups": {"a": {"models": ["l"]}, "b": {"models": ["m"]}},
}


class Cluster:
    """Workers and one frontend that do at once what the planner says."""

    def __init__(self, spec, kinds=("default", "default")):
        self.spec = spec
        self.workers = {
            f"w{i}": WorkerSays(f"w{i}", kind, version=spec.fingerprint)
            for i, kind in enumerate(kinds)
        }
        self.routes, self.applied, self.complete = {}, ("", -1), False
        self.counts = dict.fromkeys(spec.models, 0)
        self.had = dict.fromkeys(self.workers)
        self.queued = {}
        self.fails = {}  # by worker: models that it cannot load, and why

    def says(self):
        return FrontendSays(
            "f",
            Counts(dict(self.counts)),
            self.spec.fingerprint,
            applied=self.applied,
            routes=dict(self.routes),
            queued=self.queued,
            at=time.monotonic(),
        )

    async def round(self, planner):
        told = await planner.frontend(self.says())
        if told.routing is not None:
            self.routes, self.complete = told.routing.routes, told.routing.complete
            self.applied = told.epoch, told.routing.number
        for name, says in self.workers.items():
            token, wanted = await planner.worker(says, self.had[name])
            if wanted is not None:
                self.had[name] = token
                fails = self.fails.get(name, {})
                loaded = frozenset(v for v in wanted.keep if v not in fails)
                errors = {v: (why, 1.0) for v, why in fails.items() if v in wanted.keep}
                self.workers[name] = says._replace(group=wanted.group, loaded=loaded, errors=errors)

    async def until(self, planner, condition):
        until = time.monotonic() + 10
        while time.monotonic() < until:
            await self.round(planner)
            if condition(await planner.status()):
                return await planner.status()
        raise AssertionError(await planner.status())

    async def settle(self, planner):
        await self.until(planner, lambda status: status["state"] == "settled")
        await self.round(planner)  # the frontend hears of it, too
        return await planner.status()


async def here(function, problem):
    await asyncio.sleep(SOLVES_S)
    return function(problem)


async def broken(function, problem):
    await asyncio.sleep(SOLVES_S)
    raise RuntimeError("no licence")


@contextlib.contextmanager
def planner_of(spec, aside=here):
    often = Pace(step_s=0.01, poll_s=0.02, report_s=0.02)
    planner = Planner(spec, "app#frontend", aside, often)
    try:
        yield planner
    finally:
        planner.close()


def models_of(status):
    return sorted(group["models"] for group in status["groups"].values())


def test_a_pool_is_planned_at_deployment_and_for_what_was_measured():
    async def scenario():
        spec = parse_spec(POOL)
        cluster = Cluster(spec)
        with planner_of(spec) as planner:
            status = await cluster.settle(planner)
            assert models_of(status) == [["l"], ["m", "n"]]
            assert cluster.complete
            assert sorted(sorted(w.loaded) for w in cluster.workers.values()) == [["l"], ["m", "n"]]
            assert status["moves"] == 0
            cluster.counts = {"l": 100, "m": 1000, "n": 400}
            await planner.replan(cluster.says())
            status = await cluster.settle(planner)
            assert models_of(status) == [["l", "n"], ["m"]], status
            assert status["rates"]["m"] == pytest.approx(10 * status["rates"]["l"])
            assert "burst tolerance" in status["why"]
            before = status["moves"]
            cluster.counts = {model: count + 10 for model, count in cluster.counts.items()}
            cluster.counts["m"] += 100  # much the same: nothing moves
            await planner.replan(cluster.says())
            status = await cluster.settle(planner)
            assert status["moves"] == before
            assert status["why"].startswith("kept, as moves would gain no more than 10%")

    clock.run(scenario())


def test_a_solver_that_fails_leaves_the_last_plan():
    async def scenario():
        spec = parse_spec(POOL)
        cluster = Cluster(spec)
        with planner_of(spec) as planner:
            before = models_of(await cluster.settle(planner))
            planner.aside = broken
            await planner.replan(cluster.says())
            status = await cluster.settle(planner)
            assert models_of(status) == before
            assert status["error"] == "planning failed: RuntimeError: no licence"
            assert (status["plans"], status["failures"]) == (1, 1)
            told = await planner.frontend(cluster.says()._replace(applied=("", 0)))
            assert told.plans[1:3] == (1, 1)
            assert told.plans.took_s == pytest.approx(SOLVES_S)

    clock.run(scenario())


def test_without_any_plan_all_models_are_served_by_one_group():
    async def scenario():
        spec = parse_spec(POOL)
        cluster = Cluster(spec)
        with planner_of(spec, broken) as planner:
            status = await cluster.settle(planner)
            assert models_of(status) == [["l", "m", "n"]]
            assert "no licence" in status["error"]

    clock.run(scenario())


def test_an_infeasible_problem_later_on_moves_nothing():
    async def scenario():
        spec = parse_spec(POOL)
        cluster = Cluster(spec)
        with planner_of(spec) as planner:
            before = models_of(await cluster.settle(planner))
            spec.planner.kwargs["memory_mb"] = 1  # three groups, for two workers
            await planner.replan(cluster.says())
            status = await cluster.settle(planner)
            assert models_of(status) == before
            assert status["error"].startswith("infeasible: ")

    clock.run(scenario())


def test_a_new_planner_takes_over_what_it_finds():
    async def scenario():
        spec = parse_spec(POOL)
        cluster = Cluster(spec)
        with planner_of(spec) as planner:
            before = models_of(await cluster.settle(planner))
            assert before == [["l"], ["m", "n"]]
        groups = {name: (w.group, w.loaded) for name, w in cluster.workers.items()}
        routes = dict(cluster.routes)
        with planner_of(spec) as successor:
            status = await cluster.settle(successor)
            assert "taken over" in status["why"]
            assert models_of(status) == before
        assert cluster.routes == routes
        assert {name: (w.group, w.loaded) for name, w in cluster.workers.items()} == groups

    clock.run(scenario())


def test_moves_by_hand_and_a_model_that_cannot_be_loaded():
    async def scenario():
        spec = parse_spec(GROUPS)
        cluster = Cluster(spec, ["a", "b"])
        with planner_of(spec) as planner:
            status = await cluster.settle(planner)
            assert status["planner"] is None
            assert models_of(status) == [["l"], ["m"]]
            with pytest.raises(ConfigError, match="no group 'c'; the groups are a, b"):
                await planner.move("l", "c")
            with pytest.raises(UnknownModel):
                await planner.move("x", "b")
            with pytest.raises(ConfigError, match="has no planner"):
                await planner.replan(cluster.says())
            cluster.fails["w1"] = {"l": "MemoryError: no room"}
            await planner.move("l", "b")
            status = await cluster.until(planner, lambda status: status["load_errors"])
            assert status["load_errors"] == {"l on w1": "MemoryError: no room"}
            assert status["state"] == "moving"
            assert cluster.routes == {"l": "a", "m": "b"}  # it stays where it is
            cluster.fails.clear()
            await cluster.settle(planner)
            assert cluster.routes == {"l": "b", "m": "b"}
            assert [sorted(w.loaded) for w in cluster.workers.values()] == [[], ["l", "m"]]

    clock.run(scenario())


def test_an_older_release_is_told_nothing():
    async def scenario():
        spec = parse_spec(GROUPS).stamped("new")
        old = Cluster(parse_spec(GROUPS).stamped("old"), ["a", "b"])
        with planner_of(spec) as planner:
            await Cluster(spec, ["a", "b"]).settle(planner)
            assert await planner.frontend(old.says()) is None
            assert await planner.worker(old.workers["w0"], None) == (None, None)

    clock.run(scenario())


def test_a_newer_specification_starts_afresh():
    async def scenario():
        old = parse_spec(GROUPS).stamped("old")
        new_groups = {"a": {"models": ["m"]}, "b": {"models": ["l"]}}
        new = parse_spec({**GROUPS, "groups": new_groups}).stamped("new")
        with planner_of(old) as planner:
            await Cluster(old, ["a", "b"]).settle(planner)
            await planner.configure(new)
            cluster = Cluster(new, ["a", "b"])
            await cluster.settle(planner)
            assert cluster.routes == {"m": "a", "l": "b"}
            await planner.configure(old)  # an old replica comes late
            await cluster.settle(planner)
            assert cluster.routes == {"m": "a", "l": "b"}

    clock.run(scenario())


def test_layouts_and_why_are_logged(tmp_path):
    async def scenario():
        spec = parse_spec({**POOL, "decision_log": {"dir": str(tmp_path), "flush_s": 0.05}})
        cluster = Cluster(spec)
        with planner_of(spec) as planner:
            status = await cluster.settle(planner)
            (group,) = (g for g, of in status["groups"].items() if of["models"] == ["l"])
            await planner.move("m", group)
            await cluster.settle(planner)
            planner.aside = broken
            await planner.replan(cluster.says())
            planner.planning.log.close(20.0)
            return group

    group = clock.run(scenario())
    (log,) = read(tmp_path)
    first, moved, failed = log.plans
    assert (first.trigger, first.demand) == ("first plan", 52)
    assert {line for line in first.changes if "worker" in line} == {
        f"{g}: – → 1 workers" for g in first.targets
    }
    assert first.inputs["rates"] == {"l": 50, "m": 1, "n": 1}
    assert first.took_s == pytest.approx(SOLVES_S)
    (other,) = set(first.targets) - {group}
    assert moved.trigger == "moved by hand"
    assert moved.changes == (f"m: {other} → {group}",)
    assert moved.why == f"m was moved to {group} by hand"
    assert failed.error == "planning failed: RuntimeError: no licence"
    assert failed.changes == ()
