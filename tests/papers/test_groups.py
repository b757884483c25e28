"""Serving groups, the pure part: layouts, steps towards them, plans made into layouts, the spec."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from ray_slo.core import LatencyProfile
from ray_slo.papers import herd, partition
from ray_slo.papers.groups.brain import GroupsBrain, GroupsSetting
from ray_slo.papers.groups.plans import (
    Layout,
    Measured,
    best_throughput,
    make_problem,
    to_layout,
    worth_it,
)
from ray_slo.planning import Infeasible
from ray_slo.planning.brains.brain import Counts, FrontendSays, NotYet, Seen, Wanted, WorkerSays
from ray_slo.planning.brains.homes import Homes
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.planner.groups import Herd


class World:
    """Workers and a frontend that do what they are told, one thing at a time.

    Args:
        kinds: group of each kind of worker. Empty for a pool.
        workers: kind of each worker.
    """

    def __init__(self, kinds, workers, models="lmn"):
        self.models = models
        self.homes = self.new(kinds)
        self.workers = {w: WorkerSays(w, kind) for w, kind in workers.items()}
        self.now, self.number, self.routes, self.queued = 0.0, 0, {}, {}
        self.serves = False  # requests come

    def new(self, kinds):
        units = [(model,) for model in self.models]
        return Homes(
            kinds, {}, dict(zip(self.models, self.models, strict=True)), units, pool=not kinds
        )

    def seen(self):
        says = FrontendSays(
            "f", Counts(), "", applied=("", self.number), routes=self.routes, queued=self.queued
        )
        return Seen(dict(self.workers), frontends={"f": says})

    def told(self):
        homes = self.homes
        wanted = {
            w: Wanted(
                (),
                tuple(m for m in self.models if homes.layout[m] == g or m in homes.held(g)),
            )
            for w, g in homes.members(self.seen()).items()
        }
        return homes.send_home(wanted, self.seen(), self.now)

    def step(self):
        self.now += 1.0
        self.homes.look(self.now, self.seen())
        for worker, order in sorted(self.told().items()):
            self._act(self.workers[worker], order)
        routing = self.homes.routing
        # What was sent before the switch is still there in the step after it.
        self.queued = {(m, g): 1 for m, g in self.routes.items() if routing.routes[m] != g}
        self.number, self.routes = routing.number, dict(routing.routes)
        self.serves |= routing.complete
        self.check()

    def _act(self, says, order):
        missing = set(order.keep) - says.loaded
        if says.group in (None, order.group):
            loaded = says.loaded | missing if missing else frozenset(order.keep)
        else:
            loaded = says.loaded & set(order.keep)
        self.workers[says.worker] = says._replace(group=order.group, loaded=frozenset(loaded))

    def check(self):
        """Whoever sends a request now finds a worker that has its model."""
        for model, group in {*self.routes.items(), *self.queued} if self.serves else ():
            there = [s for s in self.workers.values() if s.group == group and model in s.loaded]
            assert there, f"nobody in {group} has {model}"

    def reach(self, layout, within=20):
        self.homes.place(self.now, layout.models, layout.sizes)
        for _ in range(within):
            self.step()
            if self.homes.routing.routes == layout.models and self.is_settled():
                return self
        raise AssertionError(f"{layout} not reached: {self.workers}, {self.routes}")

    def is_settled(self):
        told, status = self.told(), self.homes.status(self.seen())
        there = {w: (says.group, says.loaded) for w, says in self.workers.items()}
        return "state" not in status and there == {
            w: (order.group, frozenset(order.keep)) for w, order in told.items()
        }

    def loads(self):
        return {w: (s.group, sorted(s.loaded)) for w, s in self.workers.items()}


def test_groups_of_their_own_workers_start_and_exchange_models():
    world = World({"ka": "a", "kb": "b"}, {"v": "ka", "w": "kb", "x": "kb"}, "mn")
    world.reach(Layout({"m": "a", "n": "b"}))
    assert world.loads() == {"v": ("a", ["m"]), "w": ("b", ["n"]), "x": ("b", ["n"])}
    world.reach(Layout({"m": "b", "n": "a"}))
    assert world.loads() == {"v": ("a", ["n"]), "w": ("b", ["m"]), "x": ("b", ["m"])}


def test_a_model_whose_new_group_has_no_workers_stays():
    world = World({"ka": "a", "kb": "b"}, {"v": "ka"}, "m")
    world.homes.place(0.0, {"m": "a"})
    world.step()
    world.homes.place(world.now, {"m": "b"})
    for _ in range(302):
        world.step()
        assert world.routes == {"m": "a"}
    assert world.homes.layout == {"m": "a"}


def test_a_slow_load_is_waited_for_unless_it_fails():
    world = World({"ka": "a", "kb": "b"}, {"v": "ka", "w": "kb"}, "m")
    world.homes.place(0.0, {"m": "a"})
    world.step()
    world.homes.place(world.now, {"m": "b"})
    for _ in range(100):  # w loads m for a long time
        world.now += 1.0
        world.told()
    assert world.homes.layout == {"m": "b"}
    world.workers["w"] = world.workers["w"]._replace(errors={"m": ("no such file", 1.0)})
    world.told()
    assert world.homes.layout == {"m": "a"}


def layouts(models, workers):
    """All ways to share few models and workers out to at most three groups."""
    for assignment in itertools.product("abc", repeat=len(models)):
        groups = sorted(set(assignment))
        for sizes in itertools.product(range(1, workers + 1), repeat=len(groups)):
            if sum(sizes) == workers:
                yield Layout(
                    dict(zip(models, assignment, strict=True)),
                    dict(zip(groups, sizes, strict=True)),
                )


def test_every_change_of_a_pool_is_reached_and_nobody_is_without_a_worker_on_the_way():
    all_layouts = list(layouts("lmn", 3))
    assert len(all_layouts) == 45
    changes = 0
    for before, after in itertools.product(all_layouts[::2], all_layouts):
        # The planner keeps as many names as it can; a group without workers cannot be entered.
        if not ({*before.sizes} <= {*after.sizes} or {*after.sizes} <= {*before.sizes}):
            continue
        World({}, dict.fromkeys("vwx", "cpu")).reach(before).reach(after)
        changes += 1
    assert changes > 300


def test_workers_of_a_pool_stay_where_they_are_while_there_is_room():
    homes = Homes({}, {}, {"m": "m", "n": "n"}, [("m",), ("n",)], pool=True)
    homes.place(0.0, {"m": "a", "n": "b"}, {"a": 2, "b": 1})

    def members(**groups):
        return homes.members(Seen({w: WorkerSays(w, "cpu", group=g) for w, g in groups.items()}))

    assert members(v="a", w="b", x="b") == {"v": "a", "w": "b", "x": "a"}
    # x is on its way: that w would do as well is no reason to change one's mind
    assert members(v="a", w="b", x="b") == {"v": "a", "w": "b", "x": "a"}
    # one more than the sizes add up to
    assert members(v="a", w="b", x="a", y=None)["y"] in {"a", "b"}
    # one dies: the group that lacks one keeps what it has
    assert members(w="b", x="a") == {"w": "b", "x": "a"}


def test_herd_plans_become_layouts_that_keep_their_names():
    demand = Measured({"l": 40.0, "m": 10.0, "n": 10.0}, dict.fromkeys("lmn", 10.0))
    memory = dict.fromkeys("lmn", 1.0)
    kwargs = {"group_worker_limit": 8, "memory_mb": 2}
    problem = make_problem("herd", kwargs, demand, memory, 12, [], {})
    assert isinstance(problem, herd.Problem)
    plan = herd.plan(problem)
    assert plan.burst_tolerance == 2.0
    first = to_layout(plan, 12, [], None, pool=True)
    assert sorted(first.sizes.values()) == [4, 8]
    assert first.models["m"] == first.models["n"] != first.models["l"]
    current = Layout({"l": "g7", "m": "g2", "n": "g2"}, {"g7": 6, "g2": 6})
    again = to_layout(plan, 12, [], current, pool=True)
    assert again == Layout({"l": "g7", "m": "g2", "n": "g2"}, {"g7": 8, "g2": 4})
    assert worth_it(problem, current, plan, 0.1)  # tolerance 1.5, could be 2
    assert not worth_it(problem, again, plan, 0.1)
    assert worth_it(problem, Layout({"l": "g7"}, {"g7": 12}), plan, 0.1)  # m and n are in none
    nobody = Measured(dict.fromkeys("lmn", 0.0), dict.fromkeys("lmn", 10.0))
    idle = make_problem("herd", kwargs, nobody, memory, 12, [], {})
    assert not worth_it(idle, current, herd.plan(idle), 0.1)


@pytest.mark.parametrize(
    ("tolerance", "headroom", "min_gain", "worth"),
    [
        (2.0, 2.0, 0.0, False),  # as now
        (2.19, 2.19, 0.1, False),
        (2.21, 0.0, 0.1, True),
        (2.0, 2.21, 0.1, True),
        (1.99, 9.0, 0.1, False),  # headroom may not cost tolerance
    ],
)
def test_layouts_change_only_where_herd_gains_enough(tolerance, headroom, min_gain, worth):
    """Now 8 workers have a load of 4 and 4 a load of 1, so both figures are 2."""
    streams = herd.ModelStream("l", 4.0, 1.0), herd.ModelStream("m", 1.0, 1.0)
    problem = herd.Problem(streams, workers=12, group_worker_limit=8, memory_mb=2.0)
    now = Layout({"l": "a", "m": "b"}, {"a": 8, "b": 4})
    answer = SimpleNamespace(burst_tolerance=tolerance, headroom=headroom)
    assert worth_it(problem, now, answer, min_gain) is worth
    assert worth_it(replace(problem, workers=13), now, answer, min_gain)


@pytest.mark.parametrize(
    ("count", "then", "worth"),
    [
        (2, 0.61, False),  # rates of 5 and 3, so the spread is 1, and a tenth of the average 0.4
        (2, 0.59, True),
        (3, 2.41, False),  # one group is empty: 8 / 3, and a tenth of that
        (3, 2.39, True),
    ],
)
def test_layouts_change_only_where_partition_gains_enough(count, then, worth):
    models = partition.Model("l", 5.0, 1.0), partition.Model("m", 3.0, 1.0)
    problem = partition.Problem(models, count)
    answer = SimpleNamespace(rate_spread=then)
    assert worth_it(problem, Layout({"l": "a", "m": "b"}), answer, 0.1) is worth


def test_partition_keeps_groups_and_moves_only_what_pays():
    rates = {"k": 5.0, "l": 4.0, "m": 3.0, "n": 2.0}
    demand = Measured(rates, dict.fromkeys(rates, 1.0))
    now = Layout({"k": "a", "l": "a", "m": "b", "n": "b"})
    problem = make_problem("partition", {}, demand, {}, 2, ["a", "b"], now.models)
    assert isinstance(problem, partition.Problem)
    assert (problem.current, problem.sub_clusters) == ((0, 0, 1, 1), 2)
    plan = partition.plan(problem)
    layout = to_layout(plan, 2, ["a", "b"], now, pool=False)
    assert layout.sizes == {}
    sums = {g: sum(rates[m] for m in layout.of(g)) for g in "ab"}
    assert sums == {"a": 7.0, "b": 7.0}
    assert worth_it(problem, now, plan, 0.1)
    assert not worth_it(problem, now, plan, 0.5)
    pooled = to_layout(plan, 5, ["a", "b"], None, pool=True)
    assert sorted(pooled.sizes.values()) == [2, 3]


def test_what_cannot_be_planned_says_so_and_gives_the_best_effort():
    demand = Measured({"l": 1.0, "m": 1.0}, {"l": 1.0, "m": 1.0})
    kwargs = {"memory_mb": 5}
    problem = make_problem("herd", kwargs, demand, {"l": 10.0, "m": 1.0}, 2, [], {})
    answer = herd.plan(problem)
    assert isinstance(answer, Infeasible)
    plan = answer.best_effort
    assert plan.unplaced == ("l",)
    assert set(to_layout(plan, 2, [], None, pool=True).models) == {"m"}


def test_throughput_leaves_half_of_the_slo_to_wait():
    profile = LatencyProfile.linear(0.01, 0.05, 32)
    assert best_throughput(profile, 0.2) == pytest.approx(5 / 0.1)
    assert best_throughput(profile, 0.01) == pytest.approx(1 / 0.06)  # nothing fits: one at a time


def linear(alpha_ms, beta_ms):
    return LatencyProfile.linear(alpha_ms / 1e3, beta_ms / 1e3, 16)


def pool(workers, profiles=(), memory_mb=(), room_mb=None):
    """What a planner sees of workers that have everything."""
    return Seen(
        {f"w{i}": WorkerSays(f"w{i}", "cpu") for i in range(workers)},
        {(variant, "cpu"): profile for variant, profile in dict(profiles).items()},
        frontends={"f": FrontendSays("f", Counts(), "")},
        memory_mb={(variant, "cpu"): mb for variant, mb in dict(memory_mb).items()},
        room_mb={} if room_mb is None else {"cpu": room_mb},
    )


def planned(brain, now, seen):
    """Plans, and says why."""
    job = brain.problem(now, seen)
    return job, brain.adopt(job, brain.solve(job))


def begun(setting, seen):
    brain = GroupsBrain(setting)
    brain.begin(0.0, seen)
    return brain


def test_demand_is_by_stream_and_each_has_a_throughput_of_its_own():
    slos_s = {"m": 1.0, "m@gold": 0.1, "n": 1.0}
    setting = GroupsSetting({"m": ("m",), "n": ("n",)}, slos_s, 4, planner="herd")
    seen = pool(4, {"m": linear(10, 10), "n": linear(10, 10)})
    brain = begun(setting, seen)
    planned(brain, 0.0, seen)
    brain.counted(1.0, 1.0, Counts({"m": 300, "m@gold": 100, "m@gone": 20, "n": 100}))
    job, _ = planned(brain, 10.0, seen)
    assert job.measured.rates == {"m": 32.0, "m@gold": 10.0, "n": 10.0}
    # 16 in 170 ms, and 4 in 50 ms, for requests that can wait only that long
    most = {"m": 16 / 0.17, "m@gold": 4 / 0.05}
    assert job.measured.throughput == pytest.approx({**most, "n": 16 / 0.17})
    (of_m, of_n) = job.problem.models
    assert of_m.load == pytest.approx(32 / most["m"] + 10 / most["m@gold"])
    assert of_n.load == pytest.approx(10 / most["m"])


def test_the_goodput_of_the_policy_is_simulated_until_its_profile_is_another():
    asked = []

    def goodput(model, profiles, slo_s, guess):
        asked.append((model, sorted(profiles), slo_s))
        if model == "n":
            raise ValueError("no such policy")
        return 0.7 * guess

    slos_s = {"m": 1.0, "m@gold": 0.1, "n": 1.0}
    models = {"m": ("m/small", "m/large"), "n": ("n",)}
    setting = GroupsSetting(models, slos_s, 4, planner="herd", goodput=goodput)
    profiles = {"m/small": linear(10, 10), "m/large": linear(30, 30)}
    seen = pool(4, profiles)
    brain = begun(setting, seen)
    job, _ = planned(brain, 0.0, seen)
    both = ["m/large", "m/small"]
    assert asked == [("m", both, 1.0), ("m", both, 0.1)]  # nothing is known of n
    assert job.measured.throughput["m"] == pytest.approx(16 / 0.17)
    assert job.problem.models[0].load == pytest.approx(0.17 / 16)
    solved = brain.solve(job)
    assert solved.problem.models[0].load == pytest.approx(0.17 / 16 / 0.7)
    seen = pool(4, {**profiles, "n": linear(10, 10), "m/small": linear(11, 10)})
    del asked[:]
    job, verdict = planned(brain, 1.0, seen)
    assert asked == [("n", ["n"], 1.0)]  # a tenth slower is no other network
    assert verdict.shortfall is None
    assert job.measured.throughput["m"] == pytest.approx(0.7 * 16 / 0.186)
    del asked[:]
    planned(brain, 2.0, pool(4, {**profiles, "n": linear(10, 10), "m/small": linear(15, 10)}))
    assert [model for model, *_ in asked] == ["m", "m"]


def test_unlike_models_are_kept_apart_as_soon_as_that_is_known():
    setting = GroupsSetting(
        {"a": ("a",), "b": ("b",), "c": ("c",)},
        dict.fromkeys("abc", 1.0),
        6,
        planner="herd",
        kwargs={"max_affinity": 2.0, "max_groups": 2},
    )
    brain = begun(setting, nothing := pool(6))
    job, _ = planned(brain, 0.0, nothing)
    assert {m.affinity_set for m in job.problem.models} == {0}
    # ℓ(1)/α bounds the affinity: 1.1 and 1.2 for a and c, 21 for b
    seen = pool(6, {"a": linear(10, 1), "b": linear(1, 20), "c": linear(10, 2)})
    job, verdict = planned(brain, 1.0, seen)
    sets = {m.name: m.affinity_set for m in job.problem.models}
    assert sets["a"] == sets["c"] != sets["b"]
    groups = brain.outcome()["groups"]
    assert groups["a"] == groups["c"] != groups["b"]
    assert "kept" not in verdict.why
    noisy = pool(6, {"a": linear(10, 1), "b": linear(1, 20), "c": linear(10, 2.5)})
    assert "kept" in planned(brain, 2.0, noisy)[1].why


def test_memory_is_as_told_or_as_measured_where_a_workers_is_known():
    setting = GroupsSetting(
        {"l": ("l",), "m": ("m/a", "m/b"), "n": ("n",)},
        dict.fromkeys("lmn", 1.0),
        3,
        planner="herd",
        memory_mb={"n": 7.0},
    )
    memory_mb = {"l": 300.0, "m/a": 200.0, "m/b": 250.0, "n": 99.0}
    seen = pool(3, memory_mb=memory_mb, room_mb=500.0)
    brain = begun(setting, seen)
    job, verdict = planned(brain, 0.0, seen)
    assert [m.memory_mb for m in job.problem.models] == [300.0, 450.0, 7.0]
    assert verdict.shortfall is None
    groups = brain.outcome()["groups"]
    assert groups["l"] != groups["m"]  # 750 MB do not fit into 500
    told = begun(replace(setting, kwargs={"memory_mb": 10.0}), seen).problem(0.0, seen).problem
    assert (told.memory_mb, told.models[2].memory_mb) == (10.0, 7.0)
    seen = pool(3, memory_mb=memory_mb)  # nobody knows what a worker has
    nobody = begun(replace(setting, memory_mb={}), seen).problem(0.0, seen).problem
    assert [m.memory_mb for m in nobody.models] == [0.0, 0.0, 0.0]
    half = pool(3, memory_mb={"m/a": 200.0}, room_mb=500.0)  # m/b is not known yet
    assert begun(setting, half).problem(0.0, half).problem.models[1].memory_mb == 0.0


def test_partition_knows_dynamic_memory_and_what_a_move_costs():
    rates = {"k": 5.0, "l": 4.0, "m": 3.0, "n": 2.0}
    demand = Measured(rates, dict.fromkeys(rates, 1.0), room_mb=250.0)
    now = {"k": "a", "l": "a", "m": "b", "n": "b"}
    memory = dict.fromkeys(rates, 50.0)

    def groups_of(kwargs):
        problem = make_problem("partition", kwargs, demand, memory, 2, ["a", "b"], now)
        plan = partition.plan(problem)
        return problem, plan, {m: j for j, p in enumerate(plan.sub_clusters) for m in p.models}

    problem, plan, _ = groups_of({"dynamic_mb": {"k": 150.0}})
    assert [m.dynamic_mb for m in problem.models] == [150.0, 0.0, 0.0, 0.0]
    assert problem.max_memory_mb == 250.0  # 50 + 50 for two, 150 for k
    assert plan.rate_spread == 0.0
    _, _, tight = groups_of({"dynamic_mb": {"k": 200.0}})
    assert [m for m in rates if tight[m] == tight["k"]] == ["k"]  # nobody fits beside it
    # Even loads: l and n change places; l is dear to move, so k and m do.
    _, plan, _ = groups_of({"change_cost": {"k": 9.0}, "max_change_cost": 4.0})
    assert plan.moved == ("l", "n")
    assert "2 models move, at a cost of 4" in plan.explanation
    _, plan, _ = groups_of({"change_cost": {"l": 9.0}, "max_change_cost": 4.0})
    assert plan.moved == ("k", "m")
    _, plan, _ = groups_of({"max_change_cost": 1.0})  # one move is a load and an unload
    assert plan.moved == ()


MODEL = {"callable": "apps:Tasks", "latency_slo_ms": 500}
TWO = {"m": MODEL, "n": MODEL}
GROUPS = {"a": {"models": ["m"]}, "b": {"workers": {"cpu": {"num_replicas": 2}}, "models": ["n"]}}


def test_groups_name_their_workers():
    spec = parse_spec({"models": TWO, "groups": GROUPS})
    assert list(spec.workers) == ["a", "b-cpu"]
    assert spec.workers["b-cpu"].num_replicas == 2
    assert [spec.workers[k].group for k in ("a", "b-cpu")] == ["a", "b"]
    assert spec.grouped
    assert not spec.embedded
    pool = parse_spec({"models": TWO, "planner": {"name": "herd"}})
    assert pool.grouped
    assert pool.workers["default"].group is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"groups": {"a": {"models": ["m"]}}, "planner": None},
            "no group lists 'n'.* add it to the models of one",
        ),
        ({"groups": {"a": {"models": ["m", "x"]}}}, r"groups\.a\.models: no model 'x'.* m, n"),
        (
            {"groups": {"a": {"models": ["m"]}, "b": {"models": ["m", "n"]}}},
            r"groups\.b\.models: 'm' is in 'a', too",
        ),
        ({"groups": {"a": {"modles": []}}}, r"groups\.a\.modles: unknown key .*'models'"),
        ({"groups": {"a b": {"models": ["m", "n"]}}}, "group name 'a b'"),
        ({"groups": {"a": {"workers": {}}}}, "name at least one kind of worker"),
        ({"groups": GROUPS, "workers": {"default": {}}}, "leave these out"),
        ({"groups": GROUPS, "scheduler": "embedded"}, "every group has its own; choose 'actor'"),
        (
            {"groups": {"a": {"workers": {"b": {}}, "models": ["m"]}, "a-b": {"models": ["n"]}}},
            "workers of the same name; rename",
        ),
        (
            {"planner": {"name": "hurd"}},
            "one of herd, .*did you mean 'herd'.*got 'hurd'",
        ),
        ({"planner": {"name": "herd", "every_s": 5}}, r"planner\.every_s: unknown key.*interval_s"),
        ({"planner": {"name": "herd", "interval_s": 0}}, r"planner\.interval_s: .*above 0"),
        (
            {"planner": {"name": "herd", "kwargs": {"x": 1}}},
            "x: unknown key; valid .*backend",
        ),
        (
            {"planner": {"name": "herd", "kwargs": {"group_worker_limit": 0}}},
            "group_worker_limit must be at least 1, got 0",
        ),
        ({"planner": {"name": "herd", "memory_mb": {"m": 5}}}, "give a worker's memory"),
        (
            {"planner": {"name": "herd", "memory_mb": {"m": 5}, "kwargs": {"memory_mb": 4}}},
            r"planner\.memory_mb\.m is 5, more than a worker has .* is 4",
        ),
        ({"planner": {"name": "herd", "rates": {"x": 5}}}, r"planner\.rates: no model 'x'"),
        ({"planner": {"name": "herd", "rates": {"m": -5}}}, r"planner\.rates\.m must be at least"),
        (
            {"planner": {"name": "herd", "rates": {"m@gold": 5}}},
            r"planner\.rates: no stream 'm@gold'; the streams are m, n",
        ),
        (
            {"planner": {"name": "herd", "kwargs": {"max_affinity": 0.5}}},
            r"max_affinity: .*at least 1",
        ),
        (
            {
                "planner": {
                    "name": "partition",
                    "kwargs": {"sub_clusters": 1, "change_cost": {"x": 1}},
                }
            },
            r"planner\.kwargs\.change_cost: no model 'x'; the models are m, n",
        ),
        (
            {
                "planner": {
                    "name": "partition",
                    "kwargs": {"sub_clusters": 1, "dynamic_mb": {"m": -1}},
                }
            },
            r"planner\.kwargs\.dynamic_mb\.m must be at least 0",
        ),
        ({"planner": {"name": "herd", "kwargs": {"sub_clusters": "x"}}}, "sub_clusters"),
        ({"planner": {"name": "partition"}}, r"sub_clusters: must be the number .* from 1 to 1"),
        ({"planner": {"name": "herd"}, "groups": GROUPS}, "leave groups out .* 'partition'"),
        (
            {"planner": {"name": "partition", "kwargs": {"sub_clusters": 3}}, "groups": GROUPS},
            "sub_clusters is 3, but there are 2 groups",
        ),
        ({"planner": {"name": "herd"}, "workers": {"x": {}, "y": {}}}, "one kind of worker, but"),
    ],
)
def test_mistakes_name_the_field_the_value_and_the_choices(change, says):
    with pytest.raises(ValueError, match=says):
        parse_spec({"models": TWO, **change})


@pytest.mark.parametrize(
    "path",
    sorted((Path(__file__).parents[2] / "configs").glob("groups-*.yaml")),
    ids=lambda p: p.stem,
)
def test_shipped_configs_parse(path):
    config = yaml.safe_load(path.read_text())
    spec = parse_spec(config["applications"][0]["args"])
    assert spec.grouped
    assert spec.planner is not None


def test_the_brain_knows_classes_accuracies_and_the_policy():
    gold = {**MODEL, "slo_classes": {"gold": 50}}
    planner = {"name": "herd", "rates": {"m@gold": 3.0}, "kwargs": {"max_affinity": 2}}
    spec = parse_spec({"models": {"m": gold, "n": MODEL}, "planner": planner, "policy": "eager"})
    setting = Herd.setting(spec)
    assert setting.slos_s == {"m": 0.5, "m@gold": 0.05, "n": 0.5}
    assert (setting.rates, setting.kwargs) == ({"m@gold": 3.0}, {"max_affinity": 2.0})
    profile = LatencyProfile.linear(0.01, 0.005, 16)
    assert setting.goodput is not None
    eager = setting.goodput("m", {"m": profile}, 0.1, 80.0)
    assert 60 < eager < 90  # 8 in 85 ms would be 94
    one_by_one = {"name": "eager", "kwargs": {"max_batch_size": 1}}
    slow = Herd.setting(
        parse_spec({"models": {"m": MODEL}, "planner": "herd", "policy": one_by_one})
    )
    assert slow.goodput is not None
    assert 0 < slow.goodput("m", {"m": profile}, 0.1, 80.0) < 1 / 0.015
    assert slow.goodput("m", {"m": profile}, 30.0, 80.0) == 80.0  # chance does not matter


def test_rates_are_those_of_the_last_interval():
    models = {"l": ("l",), "m": ("m/small", "m/large")}
    setting = GroupsSetting(models, {"l": 0.5, "m": 0.5}, 2, planner="herd", rates={"l": 7.0})
    brain = GroupsBrain(setting)
    seen = Seen(
        {w: WorkerSays(w, "cpu") for w in "vw"}, frontends={"f": FrontendSays("f", Counts(), "")}
    )
    assert not brain.may_begin(Seen(seen.workers), 60.0, 60.0)  # nobody needs a layout yet
    assert brain.may_begin(seen, 0.0, 0.0)
    with pytest.raises(NotYet, match="not laid out yet"):
        brain.problem(0.0, seen)
    assert brain.begin(0.0, seen) == ""  # that takes a plan
    brain.counted(1.0, 1.0, Counts({"m": 1000}))  # before there is a plan
    assert brain.inputs(1.0, seen)["rates"] == {"l": 7.0, "m": 1.0}
    job = brain.problem(2.0, seen)
    assert brain.adopt(job, brain.solve(job)).shortfall is None
    brain.counted(5.0, 1.0, Counts({"m": 30}))
    assert brain.inputs(12.0, seen)["rates"] == {"l": 0.0, "m": 3.0}
    assert set(brain.wanted(12.0, seen, False)["v"].keep) <= {"l", "m/small", "m/large"}
    brain.adopt(job := brain.problem(12.0, seen), brain.solve(job))
    assert brain.status(seen)["rates"] == {"l": 0.0, "m": 3.0}
    assert brain.inputs(20.0, seen)["rates"] == {"l": 0.0, "m": 3.0}  # nothing was counted since


def test_a_plan_that_keeps_the_layout_without_a_plan_is_one():
    models = {"l": ("l",), "m": ("m",)}
    setting = GroupsSetting(models, {"l": 0.5, "m": 0.5}, 2, planner="herd", min_gain=1e6)
    brain = GroupsBrain(setting)
    frontends = {"f": FrontendSays("f", Counts(), "")}
    seen = Seen({w: WorkerSays(w, "cpu") for w in "vw"}, frontends=frontends)
    assert brain.begin(0.0, seen) == ""
    brain.wanted(0.0, seen, True)  # nothing could be planned
    assert brain.status(seen)["why"].startswith("there is no plan")
    job = brain.problem(1.0, seen)
    assert brain.adopt(job, brain.solve(job)).why.startswith("kept")
    assert "why" not in brain.status(seen)
