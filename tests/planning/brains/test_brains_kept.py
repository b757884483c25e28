"""What brains and their parts say to random reports is what they said when this was recorded.

Reports are drawn at random, so they need not fit the orders. No solver runs: plans are written by
hand, or come from searches that are the same on every machine.
"""

import random
from dataclasses import replace

import pytest

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import loki
from ray_slo.planning.auto import Demand, Kind, Model, Plan, Problem, Slot, Variant
from ray_slo.planning.auto.plan import Prices
from ray_slo.planning.brains import auto_jobs
from ray_slo.planning.brains.auto import AutoBrain, AutoSetting
from ray_slo.planning.brains.brain import Counts, FrontendSays, NotYet, Seen, Wanted, WorkerSays
from ray_slo.planning.brains.group_jobs import Share, measured_of, memory_of, profiles_of
from ray_slo.planning.brains.group_plans import best_throughput
from ray_slo.planning.brains.groups import GroupsBrain, GroupsSetting
from ray_slo.planning.brains.homes import Homes
from ray_slo.planning.brains.kairos import KairosBrain, KairosSetting
from ray_slo.planning.brains.known import Known
from ray_slo.planning.brains.layouts import Layout, Place, members, orders, routed, settled
from ray_slo.planning.brains.leaving import Leaving, staying
from ray_slo.planning.brains.loki import LokiBrain, LokiSetting
from ray_slo.planning.brains.measure import Measuring
from ray_slo.planning.brains.reserve import with_reserve
from ray_slo.planning.brains.sizes import Sizes
from ray_slo.planning.brains.steps import Steps
from ray_slo.planning.brains.streams import Streams
from ray_slo.planning.catalogue import InstanceType
from ray_slo.planning.loki.plans import Assignment
from ray_slo.planning.meanwhile import Plans
from ray_slo.planning.result import Infeasible
from tests.kept import condensed, kept
from tests.planning.examples import loki as loki_examples

FILE = "planning/brains"
KINDS = {"cpu": "a", "gpu": "a", "spot": "b"}
MODEL_OF = {"l-deep": "l", "l-flat": "l", "m-1": "m", "n-1": "n", "n-2": "n"}
NAMES = tuple(MODEL_OF)
LINES = {
    v: LatencyProfile.linear(0.002 * (i + 1), 0.01 + 0.003 * i, 16) for i, v in enumerate(NAMES)
}


def slot_of(rng, kind):
    names = NAMES if kind != "spot" else NAMES[2:]  # "l" is in the other group
    parts = rng.sample(names, rng.randint(1, 2))
    reserve = [v for v in rng.sample(names, 1) if v not in parts]
    assigned = tuple(Assigned(v, rng.choice([1, 2, 4]), rng.randint(1, 9) / 2) for v in parts)
    return Slot(kind, assigned, (*parts, *reserve))


def says_of(rng, name, kind):
    loaded = frozenset(rng.sample(NAMES, rng.randint(0, 4)))
    served = [v for v in sorted(loaded) if rng.random() < 0.5]
    return WorkerSays(
        name,
        kind,
        loaded,
        tuple(Assigned(v, 2, 1.5) for v in served),
        errors={"m-1": ("no memory", 3.0)} if rng.random() < 0.1 else {},
        ready=rng.random() < 0.8,
        ready_s=rng.choice([None, 2.0, 5.5, 9.0]),
        age_s=float(rng.randint(0, 90)),
        group=rng.choice([KINDS[kind], KINDS[kind], "b", None]),
        room_mb=rng.choice([None, 120.0]),
    )


def seen_of(rng, workers=5):
    kinds = [rng.choice(list(KINDS)) for _ in range(rng.randint(1, workers))]
    there = [says_of(rng, f"w{i}", kind) for i, kind in enumerate(kinds)]
    there.sort(key=lambda says: not says.ready)
    keys = [(v, k) for v in NAMES for k in KINDS if rng.random() < 0.8]
    frontends = {
        f"f{i}": FrontendSays(
            f"f{i}",
            Counts(),
            "",
            applied=("e", rng.randint(0, 12)),
            routes={m: rng.choice("ab") for m in rng.sample("lmn", rng.randint(0, 3))},
            queued={(rng.choice("lmn"), rng.choice("ab")): rng.randint(0, 2)},
        )
        for i in range(rng.randint(0, 2))
    }
    return Seen(
        {says.worker: says for says in there},
        {(v, k): LINES[v] for v, k in keys},
        frozenset(rng.sample(keys, min(len(keys), rng.choice([0, 0, 1])))),
        frontends,
        memory_mb={key: 20.0 + 10 * (i % 4) for i, key in enumerate(keys) if i % 3},
        room_mb={"cpu": 100.0} if rng.random() < 0.5 else {},
    )


def fits_of(rng):
    most = rng.randint(2, 5)
    return lambda variants, kind: len(variants) <= most


@pytest.mark.parametrize("seed", range(12))
def test_steps_spares_and_shares(seed):
    rng, found = random.Random(seed), []
    steps, leaving, measuring = Steps(MODEL_OF), Leaving(MODEL_OF), Measuring()
    for _ in range(25):
        seen, fits = seen_of(rng), fits_of(rng)
        serving = dict(seen.serving)
        placed = {w: slot_of(rng, s.kind) for w, s in seen.workers.items() if rng.random() < 0.7}
        told = steps.towards(placed, seen.workers, serving, fits, rng.random() < 0.2)
        has = {w: steps.has(says) for w, says in seen.workers.items()}
        targets = {kind: rng.randint(0, 2) for kind in KINDS if rng.random() < 0.7}
        leaving.look(targets, serving, placed.values(), fits)
        found += [told, has, leaving.least, leaving.spares, list(staying(targets, seen.workers))]
        found.append(leaving.also(dict(told)))
        unknown = rng.sample(NAMES, 3)
        found.append(measuring.shares(seen.workers, unknown, unknown[:1], rng.randint(0, 4)))
    kept(FILE, f"steps {seed}", condensed(found))


@pytest.mark.parametrize("seed", range(12))
def test_homes(seed):
    rng, found = random.Random(seed), []
    units = [("m",), ("n",)] if seed % 2 else [("m", "n")]
    allowed = {"n": ("b",)} if seed % 3 == 0 else None
    homes = Homes(KINDS, {"l": "a"}, MODEL_OF, units, allowed)
    problem, now = problem_of(group_of={"l": "a"}), 0.0
    for i in range(40):
        now += rng.choice([0.5, 5.0, 20.0, 60.0])
        seen = seen_of(rng)
        if i > 2 and rng.random() < 0.4:
            homes.place(now, {m: rng.choice("ab") for unit in units for m in unit})
        if i == 12:
            homes.give_up(now)
        homes.look(now, seen)
        told = {
            w: orders_of(rng, says) for w, says in seen.workers.items() if rng.random() < 0.9
        } | {"gone": orders_of(rng, None)}
        found += [homes.send_home(told, seen, now, fits_of(rng)), homes.routing, homes.unplaced]
        found += [homes.layout, homes.stuck, homes.moves, homes.may_move(now)]
        found += [homes.leaving("a"), homes.leaving("b"), homes.outcome(), homes.status()]
        asked = homes.asked(now, problem)
        found += [asked.group_of, asked.group_now, asked.allowed_groups]
        try:
            homes.wait(now, rng.choice([[], ["gpu"]]))
        except NotYet as said:
            found.append(str(said))
    kept(FILE, f"homes {seed}", condensed(found))


def orders_of(rng, says):
    parts = () if says is None or rng.random() < 0.4 else says.assigned[:1]
    return Wanted(parts, tuple(rng.sample(NAMES, rng.randint(0, 3))))


@pytest.mark.parametrize("seed", range(12))
def test_layouts(seed):
    rng, found = random.Random(seed), []
    member, routes = {}, {}
    for _ in range(25):
        groups = rng.sample("abc", rng.randint(1, 3))
        sizes = {g: rng.randint(0, 3) for g in groups} if rng.random() < 0.8 else {}
        layout = Layout({m: rng.choice(groups) for m in "lmn"}, sizes)
        places = {
            f"w{i}": Place(
                rng.choice(["a", "b", None]),
                rng.choice([*"abc", None]),
                frozenset(rng.sample("lmn", rng.randint(0, 3))),
            )
            for i in range(rng.randint(1, 6))
        }
        draining = {(rng.choice("lmn"), rng.choice("abc")) for _ in range(rng.randint(0, 2))}
        member = members(layout, places, {w: g for w, g in member.items() if w in places})
        routes = routed(layout, member, places, routes)
        found += [member, routes, orders(layout, member, places, routes, draining)]
        found += [settled(layout, member, places, routes, draining), layout.groups]
    kept(FILE, f"layouts {seed}", condensed(found))


def problem_of(**changes):
    models = tuple(
        Model(
            m,
            tuple(
                Variant(v, 90.0 - 5 * i, {}, {"cpu": 30.0, "gpu": 15.0})
                for i, v in enumerate(NAMES)
                if MODEL_OF[v] == m
            ),
        )
        for m in "lmn"
    )
    tasks = (
        TreeTask("m", "m", None, {"m-1": {"n": 2.0}}),
        TreeTask("n", "n", "m"),
    )
    given = {
        "models": models,
        "trees": (Tree.of_model("l", {"": 0.2, "gold": 0.1}), Tree("m", tasks, {"": 0.5})),
        "demand": {"l": Demand(20.0), "l@gold": Demand(4.0), "m": Demand(6.0)},
        "kinds": tuple(
            Kind(k, 0, 5, p, 150.0, g, 2.0 * (k == "spot"))
            for (k, g), p in zip(KINDS.items(), (1.0, 3.0, 0.25), strict=True)
        ),
    }
    return Problem(**{**given, **changes})


def counts_of(rng):
    return Counts(
        {s: rng.randint(0, 60) for s in ("l", "l@gold", "l@new", "m")},
        {v: rng.randint(0, 40) for v in NAMES if rng.random() < 0.7},
        {"m-1": {"n": rng.randint(0, 90)}},
        {"l": {rng.choice([1, 3, 9, 40, 200]): rng.randint(1, 90) for _ in range(3)}},
        {"l": rng.choice([0, 0, 8]), "m": rng.choice([0, 0, 30])},
    )


@pytest.mark.parametrize("seed", range(8))
def test_what_is_known(seed):
    rng, found = random.Random(seed), []
    known = Known(problem_of(), {("m-1", "cpu"): LINES["n-2"]})
    for _ in range(20):
        known.counted(counts_of(rng))
        seen = seen_of(rng)
        known.look(seen)
        found += [known.starts_s, known.factors, known.measured(seen).keys()]
        known.group_of = {m: rng.choice("ab") for m in rng.sample("lmn", 2)}
        for kind in KINDS:
            found += [known.model_on(kind), known.may_be_on(kind), known.unknown(seen, kind)]
            found += [known.room_mb(seen, kind), known.all_fit(seen, kind)]
        for says in seen.workers.values():
            order = orders_of(rng, says)
            found.append(with_reserve(known, seen, says, order, lambda s: s.loaded & {"l-flat"}))
        try:
            asked = known.asked(seen, {"cpu": rng.randint(0, 6)}, lambda s: s.loaded)
        except ValueError as said:
            found.append(str(said))
            continue
        found += [asked.kinds, asked.current, asked.trees]
        found += [[m.items, m.sizes, [v.memory_mb for v in m.variants]] for m in asked.models]
    kept(FILE, f"known {seed}", condensed(found))


@pytest.mark.parametrize("kind", ["ewma", "peak", "holt"])
@pytest.mark.parametrize("idle_s", [None, 3.0])
def test_streams(kind, idle_s):
    rng, now, found = random.Random(3), 0.0, []
    streams = Streams({"l": 5.0, "l@gold": 1.0, "m": 2.0}, kind, 4.0, idle_s)
    for i in range(120):
        over_s = rng.choice([0.25, 0.5, 1.0])
        now += over_s
        level = 3 if 40 < i < 70 else 1
        requests = {s: level * rng.randint(0, 40) for s in ("l", "l@new", "m")}
        if i % 10 == 0:
            requests["l@gold"] = 5
        bad = {"l": rng.choice([0, 0, 0, 9]), "m": rng.choice([0, 1])}
        streams.counted(now, over_s, requests, bad)
        demand, factors = streams.demand(now, 6.0, rng.randint(0, 6), now - 5)
        found += [demand, factors, [streams.is_idle(s, now) for s in streams]]
        for name in streams:
            one = streams[name]
            found += [one.rate(now), one.rate(now, 20.0), one.dispersion, one.seen, one.last_at]
            found += [one.bad(now - 4), one.is_bad(now - 4), one.differs(now, 40.0)]
            if factors[name] > 1.05:
                one.factor, one.factor_at = factors[name], now
    kept(FILE, f"streams {kind}, {idle_s}", condensed(found))


def test_sizes():
    rng, sizes, found = random.Random(5), Sizes(400, 100, 1e-3, 0.15), []
    for i in range(60):
        large = 40 if 20 < i < 40 else 10
        sizes.counted({rng.randint(1, large): rng.randint(1, 12) for _ in range(4)})
        found += [len(sizes), sizes.differ(), sizes.changes, sizes.values()]
        if i % 7 == 0:
            sizes.planned(sizes.values())
    kept(FILE, "sizes", condensed(found))


def plan_of(rng, kinds=tuple(KINDS), group_of=None):
    workers = {kind: rng.randint(0, 3) for kind in kinds}
    slots = tuple(slot_of(rng, kind) for kind, n in workers.items() for _ in range(n))
    served = {"l": rng.randint(0, 4) / 4, "l@gold": 1.0, "m": 0.5}
    figures = workers, slots, 80.0, served, 0.25, 3.5, Prices(), {}, "accuracy", "so it is"
    return Plan(*figures, group_of=group_of or {})


@pytest.mark.parametrize("assigns", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_auto(seed, assigns):
    rng, now, found = random.Random(seed), 0.0, []
    setting = AutoSetting(
        problem_of(group_of={"l": "a"}, budget_per_hour=9.0),
        {"cpu": 1, "gpu": 0, "spot": 2},
        frozenset({"cpu", "spot"}),
        assigns,
        up_s={"cpu": 2.0},
        down_s={"cpu": 12.0},
        idle_s=20.0 if seed % 2 else None,
        make_before_break=seed % 3 > 0,
        choosing=frozenset({"spot"} if seed % 2 else ()),
        profiles={("m-1", "gpu"): LINES["m-1"]},
    )
    brain = AutoBrain(setting)
    every = {(v, k): LINES[v] for v in NAMES for k in KINDS}
    for i in range(30):
        now += rng.choice([0.5, 1.0, 8.0])
        seen = seen_of(rng)
        if i > 2:
            seen = replace(seen, profiles=every, avoided=frozenset())
        if rng.random() < 0.8:
            brain.counted(now, 0.5, counts_of(rng) if i % 9 else Counts())
        if i == 10:
            brain.limit("cpu", 2)
        if i == 15:
            found.append(
                [brain.tune({"accuracy_floor": 60.0}), brain.tune({"accuracy_floor": 60.0})]
            )
        found += [brain.due(now, seen), brain.inputs(now, seen)]
        try:
            job = brain.problem(now, seen)
        except (NotYet, ValueError) as said:
            found.append(str(said))
        else:
            found += [job.present, job.factors, job.idle, job.usable, job.whole.demand]
            found += [job.whole.group_of, job.whole.group_now, job.whole.budget_per_hour]
            found.append([job.last is None, job.meanwhile({}).current])
            if i % 4 == 3:
                whole = plan_of(rng, group_of={m: rng.choice("ab") for m in "mn"})
                now_plan = whole if rng.random() < 0.5 else plan_of(rng)
                made = Infeasible("too few", whole) if rng.random() < 0.3 else whole
                if now_plan is whole:
                    now_plan = made
                found.append(brain.adopt(job, auto_jobs.Plans(made, now_plan)))
                found += [brain.outcome(), brain.status(seen)]
        found.append(brain.wanted(now, seen, rng.random() < 0.1))
        found += [[brain.target(kind) for kind in KINDS], brain.routing, brain.start_s]
    kept(FILE, f"auto {seed}, {assigns}", condensed(found))


@pytest.mark.parametrize("seed", range(8))
def test_loki(seed):
    rng, now, found = random.Random(seed), 0.0, []
    problem = loki_examples.chain()
    task_of = {v.name: task.name for task in problem.tasks for v in task.variants}
    lines = {v.name: v.profile for task in problem.tasks for v in task.variants}
    brain = LokiBrain(
        LokiSetting(
            problem,
            "k",
            2,
            bool(seed % 2),
            10.0,
            make_before_break=seed % 3 > 0,
            profiles={"c-middle": lines["c-middle"]},
        )
    )

    def plan():
        chosen = rng.sample(list(task_of), rng.randint(1, 4))
        made = tuple(
            Assignment(task_of[v], v, 2, rng.randint(1, 2), 4.0, 5.0, 0.02) for v in chosen
        )
        return loki.Plan("share", made, (), 80.0, 40.0, 0.25, 1, 0.0, "so", rng.random() < 0.15)

    for i in range(40):
        now += rng.choice([0.5, 1.0, 8.0])
        workers = []
        for j in range(rng.randint(1, 6)):
            loaded = frozenset(rng.sample(list(task_of), rng.randint(0, 3)))
            assigned = tuple(Assigned(v, 2, 1.0) for v in sorted(loaded)[: rng.randint(0, 1)])
            ready = rng.random() < 0.8
            workers.append(WorkerSays(f"w{j}", "k", loaded, assigned, ready=ready))
        workers.sort(key=lambda says: not says.ready)
        profiles = {(v, "k"): p for v, p in lines.items() if rng.random() < 0.95}
        avoided = frozenset({("c-large", "k")}) if rng.random() < 0.1 else frozenset()
        seen = Seen({w.worker: w for w in workers}, profiles, avoided)
        made = {"d-large": {"classify": rng.randint(0, 60)}}
        brain.counted(now, 0.5, Counts({"detect": rng.randint(5, 40)}, {"d-large": 20}, made))
        if i == 20:
            brain.limit("k", 3)
        found += [brain.due(now, seen), brain.inputs(now, seen), brain.outcome(), brain.expected]
        try:
            job = brain.problem(now, seen)
        except (NotYet, ValueError) as said:
            found.append(str(said))
        else:
            found += [job.present, job.usable, job.problem.current, job.problem.demand]
            found += [[v.factors for v in task.variants] for task in job.problem.tasks]
            if i % 4 == 2:
                whole = plan()
                made = Infeasible("too few", whole) if rng.random() < 0.3 else whole
                other = made if rng.random() < 0.5 else plan()
                found.append(brain.adopt(job, Plans(made, other, job.present)))
        found += [brain.wanted(now, seen, rng.random() < 0.2), brain.target("k")]
    kept(FILE, f"loki {seed}", condensed(found))


def sustained(problem, configuration, bound, requests):
    """Return what a made-up policy sustains: less of large configurations."""
    return bound * (0.9 - 0.03125 * sum(configuration.values()))


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"follow_load": False}, {"base": "big", "bound": "paper"}, {"sizes": {1: 3.0, 40: 1.0}}],
    ids=str,
)
@pytest.mark.parametrize("simulated", [False, True])
def test_kairos(kwargs, simulated):
    rng, now, found = random.Random(11), 0.0, []
    lines = {
        "big": LatencyProfile.linear(0.002, 0.018, 100),
        "small": LatencyProfile.linear(0.0213, 0.0217, 100),
        "tiny": LatencyProfile.linear(0.0431, 0.0119, 60),
    }
    prices = {"big": 1.0, "small": 0.26, "tiny": 0.11}
    types = {k: InstanceType(name=k, price_per_hour=p) for k, p in prices.items()}
    brain = KairosBrain(
        KairosSetting(
            "rank",
            ("r",),
            1.005,
            types,
            dict.fromkeys(types, 9),
            {"budget_per_hour": 2.3} | kwargs,
            rate=9.0,
            sustained=sustained if simulated else None,
        )
    )
    for i in range(16):
        now += 2.0
        kinds = rng.choice([["big", "small"], ["big", "small", "tiny"]])
        there = [f"{k}{j}" for k in kinds for j in range(rng.randint(1, 2))]
        says = {w: WorkerSays(w, w.rstrip("012")) for w in there}
        seen = Seen(says, {("r", k): lines[k] for k in (kinds if i > 3 else kinds[:1])})
        sizes = {rng.randint(1, 30 if i < 10 else 90): rng.randint(1, 30) for _ in range(6)}
        brain.counted(now, 2.0, Counts({"rank": sum(sizes.values())}, sizes={"rank": sizes}))
        if i == 8:
            brain.limit("tiny", 2)
        if i == 11:
            found.append(brain.tune({"budget_per_hour": 1.7}))
        found += [brain.due(now, seen), brain.inputs(now, seen), brain.outcome()]
        try:
            job = brain.problem(now, seen)
        except NotYet as said:
            found.append(str(said))
        else:
            found += [job.rate, job.planned_rate, job.limits, job.current, job.problem.sizes]
            if i % 3 == 2:
                found.append(brain.adopt(job, brain.solve(job)))
        found += [brain.wanted(now, seen, False), [brain.target(k) for k in types]]
    kept(FILE, f"kairos {kwargs}, {simulated}", condensed(found))


def goodput(model, profiles, slo_s, guess):
    """Return what a made-up policy attains."""
    return guess * (0.5 if model == "l" else 0.75)


@pytest.mark.parametrize(
    ("planner", "pool"),
    [("herd", True), ("partition", True), ("partition", False), (None, True), (None, False)],
)
def test_groups(planner, pool):
    rng, now, found = random.Random(13), 0.0, []
    kwargs = {
        "herd": {"exact_cells": 0, "max_affinity": 2.0},
        "partition": {"time_limit_s": 0.0, "dynamic_mb": {"l": 4.0}, "change_cost": {"m": 2.0}},
    }.get(planner, {})
    if planner == "partition" and pool:
        kwargs |= {"sub_clusters": 2}
    variants = {m: tuple(v for v in NAMES if MODEL_OF[v] == m) for m in "lmn"}
    brain = GroupsBrain(
        GroupsSetting(
            variants,
            {"l": 0.2, "l@gold": 0.1, "m": 0.15, "n": 0.3},
            4,
            {} if pool else {"a": ("l",), "b": ("m",)},
            {} if pool else KINDS,
            planner,
            kwargs,
            {"l": 30.0, "m": 4.0},
            {"n": 10.0},
            profiles={"l-deep": LINES["l-deep"]},
            refused={("n", "b"): "it cannot"},
            goodput=goodput,
        )
    )
    begun = False
    for i in range(60):
        now += rng.choice([0.5, 1.0, 20.0])
        seen = seen_of(rng)
        if i < 6:
            none = {w: s._replace(assigned=(), group=None) for w, s in seen.workers.items()}
            fronts = {f: s._replace(routes={}) for f, s in seen.frontends.items()}
            seen = replace(seen, workers=none, frontends=fronts)
        brain.counted(now, 0.5, counts_of(rng))
        begins = brain.may_begin(seen, now, now)
        found.append(begins)
        if begins and not begun:
            begun = True
            found.append(brain.begin(now, seen))
        try:
            job = brain.problem(now, seen)
        except NotYet as said:
            found.append(str(said))
        else:
            found += [job.problem, job.measured, job.counted, job.unknown.keys()]
            if i % 5 == 4:
                found.append(brain.adopt(job, brain.solve(job)))
        if i % 11 == 10:
            try:
                found.append(brain.move(rng.choice("lmn"), rng.choice(["a", "b", "g1"])))
            except (ValueError, NotYet) as said:
                found.append(str(said))
        found += [brain.wanted(now, seen, i == 8), brain.routing, brain.status(seen)]
        found += [brain.inputs(now, seen), brain.outcome()]
    kept(FILE, f"groups {planner}, {pool}", condensed(found))


def test_measurements_of_groups():
    rng, found = random.Random(17), []
    variants = {m: tuple(v for v in NAMES if MODEL_OF[v] == m) for m in "lmn"}
    slos_s = {"l": 0.2, "l@gold": 0.05, "m": 0.15, "n": 0.3}
    for _ in range(20):
        seen = seen_of(rng)
        profiles = {m: profiles_of(of, seen, {"m-1": LINES["n-2"]}) for m, of in variants.items()}
        rates = {s: rng.randint(0, 40) / 2 for s in slos_s}
        measured = measured_of(rates, slos_s, profiles, {"l": 0.5})
        found += [measured.models, measured.throughput, measured.profiles.keys()]
        found += [[measured.load(m), measured.rate(m), measured.of_model(m)] for m in "lmn"]
        found += [measured.affinity_sets(most) for most in (1.2, 1.6, 3.0)]
        found += [measured.divergence("lm"), measured.divergence("n"), memory_of(variants, seen)]
        for of in profiles.values():
            share = Share(0.5, {v: LINES[v].scaled(1.15) for v in of})
            found.append(share.fits(of))
            found.append([best_throughput(p, 0.1) for p in of.values()])
    kept(FILE, "measurements", condensed(found))
