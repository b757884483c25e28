"""Groups that a planner finds and keeps."""

import itertools
from dataclasses import replace

import pytest

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.core.trees import Tree
from ray_slo.planning.auto import Demand, Kind, Model, Problem, Variant
from ray_slo.planning.brains.auto import AutoBrain
from ray_slo.planning.brains.auto_jobs import AutoSetting
from ray_slo.planning.brains.brain import (
    Counts,
    FrontendSays,
    NotYet,
    Seen,
    Wanted,
    WorkerSays,
)
from ray_slo.planning.brains.homes import Homes

KINDS = {"a-cpu": "a", "a-gpu": "a", "b": "b"}
MODELS = {"l": "a", "m": "b"}
VARIANTS = {"l-deep": "l", "l-flat": "l", "m": "m"}


def says(worker, kind, group, *loaded):
    return WorkerSays(worker, kind, frozenset(loaded), group=group)


def seen(*workers):
    return Seen({w.worker: w for w in workers})


def test_workers_are_sent_to_the_group_of_their_kind():
    homes = Homes(KINDS, MODELS, VARIANTS)
    there = seen(says("u", "a-gpu", None), says("v", "b", "b"))
    sent = homes.send_home({"u": Wanted((), ("l-deep",)), "v": Wanted((), ("m",))}, there)
    assert sent == {
        "u": Wanted((), ("l-deep",), group="a"),
        "v": Wanted((), ("m",), group="b"),
    }


def test_requests_may_come_when_every_model_is_served_in_its_group():
    homes = Homes(KINDS, MODELS, VARIANTS)
    first = homes.routing
    assert (first.routes, first.groups, first.complete) == (MODELS, ("a", "b"), False)
    homes.look(0.0, seen(says("u", "a-gpu", "a", "l-flat"), says("v", "b", None, "m")))
    assert homes.routing == first  # v has not told its group's scheduler yet
    homes.look(0.0, seen(says("u", "a-gpu", "a", "l-flat"), says("v", "b", "b", "m")))
    assert homes.routing.complete
    assert homes.routing.number > first.number
    homes.look(0.0, seen())
    assert homes.routing.complete


def test_without_groups_there_is_nothing_to_say():
    homes = Homes({}, {}, VARIANTS)
    homes.look(0.0, seen(says("u", "cpu", None, "m")))
    assert homes.routing is None
    sent = homes.send_home({"u": Wanted((), ("m",))}, seen(says("u", "cpu", None)))
    assert sent == {"u": Wanted((), ("m",))}


def grouped(assigns):
    """Two models, each in a group of its own; the one has two kinds of workers."""
    models = tuple(
        Model(m, tuple(Variant(v, 90.0, {}) for v, of in VARIANTS.items() if of == m))
        for m in MODELS
    )
    trees = tuple(Tree.of_model(m, {"": 0.5}) for m in MODELS)
    kinds = tuple(Kind(name, 1, 4, 1.0, group=group) for name, group in KINDS.items())
    demand = dict.fromkeys(MODELS, Demand(20.0))
    problem = Problem(models, trees, demand, kinds, budget_per_hour=8.0, group_of=MODELS)
    first = dict.fromkeys(KINDS, 1)
    choosing = frozenset(() if assigns else KINDS)
    return AutoBrain(AutoSetting(problem, first, scales=frozenset(KINDS), choosing=choosing))


FAST = LatencyProfile.linear(0.01, 0.02, 8)
PROFILES = {
    (variant, kind): FAST
    for variant, model in VARIANTS.items()
    for kind, group in KINDS.items()
    if MODELS[model] == group
}


@pytest.mark.parametrize("assigns", [True, False])
def test_auto_measures_and_serves_each_groups_models_on_its_own_workers(assigns):
    brain = grouped(assigns)
    empty = seen(*(says(f"w-{kind}", kind, None) for kind in KINDS))
    with pytest.raises(NotYet, match="l-deep, l-flat, m not measured yet"):
        brain.problem(0.0, empty)
    first = brain.wanted(0.0, empty, False)
    assert {w: order.group for w, order in first.items()} == {
        f"w-{kind}": group for kind, group in KINDS.items()
    }
    for worker, order in first.items():
        mine = {v for v, m in VARIANTS.items() if MODELS[m] == order.group}
        assert order.keep and set(order.keep) <= mine, worker
    loaded = [says(f"w-{k}", k, g, *first[f"w-{k}"].keep) for k, g in KINDS.items()]
    there = Seen({w.worker: w for w in loaded}, PROFILES)
    job = brain.problem(1.0, there)
    verdict = brain.adopt(job, brain.solve(job))
    assert verdict.shortfall is None
    for worker, order in brain.wanted(1.0, there, False).items():
        kind = worker.removeprefix("w-")
        assert order.group == KINDS[kind]
        assert {MODELS[VARIANTS[v]] for v in order.keep} <= {KINDS[kind]}
    assert brain.routing.routes == MODELS
    assert brain.routing.complete
    with pytest.raises(ValueError, match="'auto' leaves models in the groups that list them"):
        brain.move("l", "b")


# -- models that the planner places ------------------------------------------------------------

UNITS = [("x",), ("y", "z")]
FREE = {"x": "x", "y": "y", "z": "z", "l": "l"}


class World:
    """Workers and a frontend that do what they are told, one thing at a time."""

    def __init__(self, room=9):
        self.homes = self.new()
        self.serves = False  # requests come
        self.hears = True  # the planner hears the frontend
        self.workers = {w: says(w, f"k{w[0]}", None) for w in ("a1", "a2", "b1", "b2")}
        self.room, self.now, self.number, self.routes, self.queued = room, 0.0, 0, {}, {}

    def new(self):
        return Homes({"ka": "a", "kb": "b"}, {"l": "a"}, FREE, UNITS)

    def restart(self):
        """The planner dies; its successor does not hear the frontend at first."""
        self.homes, self.hears, self.number = self.new(), False, -1

    def seen(self):
        frontend = FrontendSays(
            "f", Counts(), "", applied=("", self.number), routes=self.routes, queued=self.queued
        )
        return Seen(dict(self.workers), frontends={"f": frontend} if self.hears else {})

    def fits(self, variants, kind):
        return len(variants) <= self.room

    def wanted(self):
        """Every worker has all models of its group, and measures those of none."""
        group_of = self.homes.layout.get
        return {
            w: Wanted((), tuple(sorted(m for m in FREE if group_of(m, w[0]) == w[0])))
            for w in self.workers
        }

    def step(self):
        self.now += 1.0
        self.homes.look(self.now, self.seen())
        told = self.homes.send_home(self.wanted(), self.seen(), self.now, self.fits)
        for worker, order in told.items():
            loaded = self.workers[worker].loaded
            missing = sorted(set(order.keep) - loaded)
            has = loaded | {missing[0]} if missing else loaded & set(order.keep)
            assert len(has) <= self.room, f"{worker} has no memory for {sorted(has)}"
            self.workers[worker] = says(worker, f"k{worker[0]}", order.group, *has)
        # What was sent before the switch is still there in the step after it.
        if self.hears:
            routing = self.homes.routing
            routes = {**self.routes, **routing.routes}
            self.queued = {(m, g): 1 for m, g in self.routes.items() if routes[m] != g}
            self.number, self.routes = routing.number, routes
            self.serves |= routing.complete
        self.check()

    def check(self):
        """Whoever has sent a request, or sends one now, finds a worker that has its model."""
        if not self.serves:
            return
        for model, group in {*self.routes.items(), *self.queued}:
            there = [w for w in self.workers.values() if w.group == group and model in w.loaded]
            assert there, f"nobody in {group} has {model}"

    def reach(self, layout, within=20):
        self.homes.place(self.now, layout)
        for _ in range(within):
            self.step()
            loaded = {w: says.loaded for w, says in self.workers.items()}
            wanted = {w: set(order.keep) for w, order in self.wanted().items()}
            if loaded == wanted and self.homes.routing.routes == self.homes.layout:
                return self
        raise AssertionError(f"{layout} not reached: {self.workers}")


def layouts():
    return [{"x": g, "y": h, "z": h} for g in "ab" for h in "ab"]


@pytest.mark.parametrize("before", layouts())
@pytest.mark.parametrize("after", layouts())
def test_units_move_and_nobody_is_without_a_worker_on_the_way(before, after):
    world = World().reach(before).reach(after).reach(before)
    assert world.homes.layout == {"l": "a", **before}
    assert not any(world.homes.leaving(group) for group in "ab")


@pytest.mark.parametrize("before", layouts())
@pytest.mark.parametrize("after", layouts())
@pytest.mark.parametrize("heard_at", [0, 4])  # before it plans, or after
def test_a_planner_that_is_new_leaves_nobody_without_a_worker_whoever_it_hears(
    before, after, heard_at
):
    for steps, wanted in itertools.product(range(6), layouts()):
        world = World().reach(before)
        world.homes.place(world.now, after)
        for _ in range(steps):  # a move has begun, or is over
            world.step()
        world.restart()
        for step in range(16):
            world.hears = step >= heard_at
            world.homes.look(world.now, world.seen())
            if step == 1:
                world.homes.place(world.now, wanted)
            world.step()
        assert world.routes == {"l": "a", **wanted}


def test_a_worker_without_room_for_both_waits_until_the_old_one_is_gone():
    world = World(room=3).reach({"x": "a", "y": "b", "z": "b"})
    world.reach({"x": "b", "y": "b", "z": "b"}).reach({"x": "b", "y": "b", "z": "b"})


def test_a_unit_that_its_new_group_cannot_load_stays():
    world = World(room=2).reach({"x": "a", "y": "b", "z": "b"})
    world.homes.place(world.now, {"x": "b"})
    world.workers = {w: s for w, s in world.workers.items() if w[0] == "a"}
    world.homes.look(world.now, world.seen())
    for _ in range(301):  # workers may be starting
        world.now += 1.0
        world.homes.send_home(world.wanted(), world.seen(), world.now)
    assert world.homes.layout["x"] == "a"
    assert world.homes.stuck.keys() == {("x", "b")}
    kinds = Kind("ka", 1, 1, group="a"), Kind("kb", 1, 1, group="b")
    models = tuple(Model(m, (Variant(m, 90.0, {}),)) for m in FREE)
    trees = tuple(Tree.of_model(m, {"": 0.5}) for m in FREE)
    asked = world.homes.asked(world.now, Problem(models, trees, {}, kinds))
    assert asked.group_of.keys() == set(FREE)  # one has tried to move a moment ago
    asked = world.homes.asked(world.now + 100, Problem(models, trees, {}, kinds))
    assert (asked.group_of, asked.allowed_groups["x"]) == ({"l": "a"}, ("a",))
    assert asked.group_now == {"x": "a", "y": "b", "z": "b"}
    asked = world.homes.asked(world.now + 1000, Problem(models, trees, {}, kinds))
    assert "x" not in asked.allowed_groups  # it may be tried again


def test_a_worker_goes_on_with_what_leaves_its_group_until_no_request_is_left():
    homes = Homes({"ka": "a", "kb": "b"}, {}, FREE, [("x",)])
    homes.place(0.0, {"x": "a"})
    old = says("a1", "ka", "a", "x")._replace(assigned=(Assigned("x", 4, 20.0),))
    new = says("b1", "kb", "b")
    homes.place(1.0, {"x": "b"})
    wanted = {"a1": Wanted((), ()), "b1": Wanted((Assigned("x", 4),), ("x",))}
    told = homes.send_home(wanted, seen(old, new), 1.0)
    assert told["a1"] == Wanted(old.assigned, ("x",), group="a")
    assert homes.routing.routes == {"x": "a"}
    assert homes.leaving("a") and not homes.leaving("b")
    ready = says("b1", "kb", "b", "x")
    told = homes.send_home(wanted, seen(old, ready), 2.0)
    assert (homes.routing.routes, homes.moves) == ({"x": "b"}, 1)
    assert told["a1"].keep == ("x",)  # its requests may still wait there

    def heard(number, **queued):
        there = seen(old, ready)
        frontend = FrontendSays("f", Counts(), "", applied=("", number), queued=queued)
        homes.look(3.0, Seen(there.workers, frontends={"f": frontend}))
        return homes.send_home(wanted, there, 3.0)["a1"].keep

    number = homes.routing.number
    assert heard(number - 1) == ("x",)
    assert heard(number, **{}) == ()
    assert not homes.leaving("a")


def test_a_planner_that_is_new_goes_on_where_requests_go():
    homes = Homes({"ka": "a", "kb": "b"}, {"l": "a"}, FREE, UNITS)
    frontend = FrontendSays("f", Counts(), "", routes={"l": "a", "x": "b", "y": "a", "z": "a"})
    there = seen(says("a1", "ka", "a", "l", "y", "z", "x"), says("b1", "kb", "b", "x"))
    homes.look(0.0, Seen(there.workers, frontends={"f": frontend}))
    assert homes.layout == {"l": "a", "x": "b", "y": "a", "z": "a"}
    assert homes.routing.routes == homes.layout and not homes.unplaced
    assert homes.leaving("a")  # a1 may have requests of x
    assert not homes.may_move(1.0)  # nobody knows the demand yet
    wanted = {"a1": Wanted((), ("l", "y", "z")), "b1": Wanted((), ("x",))}
    assert set(homes.send_home(wanted, there, 0.0)["a1"].keep) == {"l", "x", "y", "z"}


def test_without_a_plan_models_are_served_somewhere():
    homes = Homes({"ka": "a", "kb": "b"}, {"l": "a"}, FREE, UNITS, {"x": ("b",)})
    homes.give_up(0.0)
    assert homes.layout == {"l": "a", "x": "b", "y": "a", "z": "a"}


def test_auto_chooses_groups_moves_what_does_not_fit_and_takes_over():
    models = tuple(Model(m, (Variant(m, 90.0, {}),)) for m in "xyz")
    trees = tuple(Tree.of_model(m, {"": 0.5}) for m in "xyz")
    kinds = tuple(Kind(f"k{g}", 1, 2, group=g) for g in "ab")
    demand = {"x": Demand(100.0), "y": Demand(100.0), "z": Demand(10.0)}
    problem = Problem(models, trees, demand, kinds)
    setting = AutoSetting(problem, {"ka": 1, "kb": 1}, scales=frozenset(("ka", "kb")))
    brain = AutoBrain(replace(setting, choosing=frozenset(("ka", "kb"))))
    profiles = {(m, f"k{g}"): FAST for m in "xyz" for g in "ab"}

    def there(**loaded):
        workers = [says(w, f"k{w[0]}", w[0], *its) for w, its in loaded.items()]
        return Seen({w.worker: w for w in workers}, profiles)

    one = Seen({"a1": says("a1", "ka", "a")}, profiles)
    with pytest.raises(NotYet, match="no worker of kb is there yet"):
        brain.problem(0.0, one)
    assert brain.problem(40.0, one)  # one does not wait for ever
    assert brain.routing.routes == {} and not brain.routing.complete
    everywhere = there(a1="xyz", b1="xyz")
    job = brain.problem(41.0, everywhere)
    brain.adopt(job, brain.solve(job))
    routes = brain.routing.routes
    assert routes["x"] != routes["y"]
    told = brain.wanted(42.0, everywhere, False)
    for worker, order in told.items():
        assert {routes[v] for v in order.keep} == {worker[0]}
    assert brain.outcome()["groups"] == routes
    assert {g: s["wanted_models"] for g, s in brain.status(everywhere)["groups"].items()} == {
        g: sorted(m for m in routes if routes[m] == g) for g in "ab"
    }
