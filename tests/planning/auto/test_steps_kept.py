"""What the steps between a program and a plan of `auto` give is what they gave when recorded.

Solutions and plans are written by hand, so no solver chooses among equally good ones.
"""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from ray_slo.core.cluster import Assigned
from ray_slo.planning.auto import Demand, Hosted, Kind, Plan, Slot
from ray_slo.planning.auto.build import build
from ray_slo.planning.auto.expected import bad_share, expected
from ray_slo.planning.auto.graph import Config
from ray_slo.planning.auto.headroom import Pool, late_by_stream, pools_of
from ray_slo.planning.auto.hosts import (
    Blocked,
    Unpacked,
    apart,
    may_wait,
    shared,
    spread_over,
    waiting_classes,
)
from ray_slo.planning.auto.limits import Found, Limits, Room
from ray_slo.planning.auto.overflow import late_by_stream as lost_by_stream
from ray_slo.planning.auto.pack import pack
from ray_slo.planning.auto.place import place, swaps
from ray_slo.planning.auto.plan import Prices
from ray_slo.planning.auto.prices import prices_of
from ray_slo.planning.auto.problem import Size
from ray_slo.planning.auto.program import Program
from ray_slo.planning.auto.sizes import by_size, classes_of, ends_of, size_of
from ray_slo.planning.auto.sizes import together as without_sizes
from ray_slo.planning.auto.taken import both, most_busy, room
from ray_slo.planning.auto.uses import Use, rest_of, together, uses_of
from ray_slo.planning.milp import Solution
from tests.kept import condensed, kept
from tests.planning.auto.cases import photo

FILE = "planning/auto"
NAMES = ("d-l", "d-s", "n-l", "n-s")


def use_of(rng, name, kind="gpu"):
    latency_s = rng.choice([0.008, 0.016, 0.032])
    batch = rng.choice([1, 2, 4, 8])
    size = rng.choice([None, Size(4, 2.0, 0.5)])
    config = Config(name, kind, batch, latency_s, batch / latency_s, 2 * latency_s, size)
    stream = (
        ("photo", "detect") if name[0] == "d" else rng.choice([("photo", "name"), ("face",) * 2])
    )
    rate = rng.randint(1, 40) / 16 * config.throughput
    return Use(
        config, rate, rng.choice([1.0, 2.0, 4.0]), (stream,), rng.choice([0.005, 0.02, 0.05])
    )


def uses_drawn(rng, most=4):
    return [use_of(rng, name) for name in rng.sample(NAMES, rng.randint(1, most))]


@pytest.mark.parametrize("seed", range(20))
def test_slots_of_uses(seed):
    rng, found = random.Random(seed), []
    for _ in range(6):
        memory = rng.choice([math.inf, 100.0])
        kind = Kind("gpu", rng.randint(0, 2), 12, 2.0, memory)
        problem = photo(kinds=(kind, Kind("cpu", 0, 2, 0.5)), sharing=rng.random() < 0.8)
        if memory < math.inf:
            models = tuple(
                replace(m, variants=tuple(replace(v, memory_mb={"gpu": 40.0}) for v in m.variants))
                for m in problem.models
            )
            problem = replace(problem, models=models)
        rooms = {("", "gpu"): Room(0.875, 0.25), ("d-l", "gpu"): Room(0.75, 0.5)}
        limits = Limits(
            rooms if rng.random() < 0.7 else {},
            mixed=frozenset({"gpu"} if rng.random() < 0.2 else ()),
        )
        uses = together(uses_drawn(rng))
        if rng.random() < 0.5:
            current = tuple(
                Hosted(f"w{i}", "gpu", frozenset(rng.sample(NAMES, rng.randint(1, 4))))
                for i in range(rng.randint(1, 6))
            )
            problem = replace(problem, current=current)
        program = Program(problem, limits=limits)
        most = rng.randint(1, 12)
        for divide in (shared, apart):
            try:
                slots = divide(program, kind, uses, most)
            except (Unpacked, Blocked) as failed:
                found.append([str(failed), failed.workers, getattr(failed, "longest_s", None)])
            else:
                found.append(slots)
        found.append([[u.config.variant for u in its] for its in waiting_classes(uses)])
        found.append(uses)
        # With one worker that has all of them, there is only one way to spread the uses.
        loaded = [frozenset(NAMES)]
        found.append(spread_over(uses, loaded, rng.choice([0.5, 4.0])))
        names = [use.config.variant for use in uses]
        made = [{v: rng.randint(1, 8) / 8 for v in names} for _ in range(3)] + [{names[0]: 0.5}]
        found.append(may_wait(uses, made))
    kept(FILE, f"slots {seed}", condensed(found))


@pytest.mark.parametrize("seed", range(8))
def test_pools(seed):
    rng, found = random.Random(seed), []
    for _ in range(6):
        uses = uses_drawn(rng)
        for sharing in (True, False):
            pools = pools_of(uses, sharing, {"photo": 2, "face": 1})
            workers = {pair: rng.randint(1, 9) for pair in pools}
            found += [pools, late_by_stream(pools, workers, uses, sharing)]
            for pair, pool in pools.items():
                n = workers[pair]
                found += [pool.room(n), pool.bad_rate(n), pool.too_full(n, 0.01)]
                found += [pool.most_busy(n, 0.02), pool.allowed(n, 30, 0.01)]
                found.append(pool.allowed(2, 3, 0.01))
        pool = Pool.of(uses, 3)
        found += [pool, pool.too_full(4, 0.3)]
    kept(FILE, f"pools {seed}", condensed(found))


def test_rooms():
    rng, found = random.Random(1), []
    for _ in range(60):
        one = Room(rng.randint(4, 8) / 8, rng.randint(0, 8) / 8)
        found += [one.busy(5), one.workers(2.25), one.part(0.5), both(one, Room(0.5, 0.25))]
        limits = Limits({("", "k"): one}, {"k": rng.randint(1, 5)}, {"k": 0.5})
        found += [limits.level("k"), limits.level("l"), limits.unpacked("k", rng.randint(1, 5))]
        found.append(limits.unpacked("l", 2))
        there = rng.choice([0.5, 0.875, 0.96875])
        found += [most_busy(rng.randint(1, 9), there, 0.015625)]
        found += [room(rng.randint(1, 40) / 8, there, 0.015625, rng.randint(1, 30))]
    base = photo()
    holds = Found.of(base, Limits())
    for factor in (0.79, 0.8, 1.0, 1.2, 1.21):
        other = {s: Demand(d.rate * factor, d.dispersion) for s, d in base.demand.items()}
        found.append(holds.holds_for(replace(base, demand=other)))
        other = {s: Demand(d.rate, d.dispersion * factor) for s, d in base.demand.items()}
        found.append(holds.holds_for(replace(base, demand=other)))
    for changes in ({"sharing": False}, {"present": {"gpu": 1}}, {"target_bad": 0.02}):
        found.append(holds.holds_for(replace(base, **changes)))
    kept(FILE, "rooms", condensed(found))


@pytest.mark.parametrize("seed", range(6))
def test_packs_and_places(seed):
    rng, found = random.Random(seed), []
    for _ in range(40):
        busy = {name: rng.randint(1, 24) / 16 for name in rng.sample(NAMES, rng.randint(1, 4))}
        needs = {name: rng.choice([0.0, 32.0, 48.0, 64.0]) for name in busy}
        found.append(pack(busy, rng.randint(0, 6), needs, 128.0, rng.choice([0.75, 1.0])))
        slots = []
        for _ in range(rng.randint(1, 5)):
            parts = [
                Assigned(v, 2, rng.choice([None, 0.5, 1.0, 4.0]))
                for v in rng.sample(NAMES, rng.randint(1, 2))
            ]
            slots.append(Slot(rng.choice("kl"), tuple(parts), tuple(p.variant for p in parts)))
        workers = {
            f"w{i}": (rng.choice("kl"), rng.sample(NAMES, rng.randint(0, 3)))
            for i in range(rng.randint(1, 5))
        }
        placed = place(slots, workers)
        # Workers that are equally good may be chosen in any order, so only the costs count.
        found += [sorted(map(str, placed.values())), swaps(placed, workers)]
    kept(FILE, f"packs {seed}", condensed(found))


def plan_of(rng, problem):
    slots = []
    for kind in problem.kinds:
        for _ in range(rng.randint(1, 3)):
            names = rng.sample(NAMES, rng.randint(1, 3))
            parts = tuple(
                Assigned(v, rng.choice([1, 4, 99]), rng.choice([None, 2.0, 15.0, 40.0]))
                for v in names[: rng.randint(1, 2)]
            )
            slots.append(Slot(kind.name, parts, tuple(names)))
    figures = 80.0, {}, 0.0, 1.0, Prices(), {}, "accuracy", "so"
    return Plan({}, tuple(slots), *figures)


@pytest.mark.parametrize("seed", range(16))
def test_what_plans_lose(seed):
    rng, found = random.Random(seed), []
    kinds = (Kind("gpu", 0, 4, 2.0, rng.choice([math.inf, 100.0])), Kind("cpu", 0, 8, 0.5))
    problem = photo(kinds=kinds, accuracy_floor=rng.choice([0.0, 0.0, 80.0]))
    items = rng.choice([1.0, 1.0, 2.5])
    models = tuple(
        replace(
            m,
            items=items,
            variants=tuple(replace(v, memory_mb={"gpu": 45.0}) for v in m.variants),
        )
        for m in problem.models
    )
    problem = replace(problem, models=models)
    for times in (0.25, 1.0, 2.0, 6.0):
        plan = plan_of(rng, problem)
        demand = {
            "photo": Demand(10.0 * times, rng.choice([1.0, 4.0])),
            "face": Demand(rng.choice([0.0, 30.0 * times])),
            "face@gold": Demand(5.0 * times, 2.0),
        }
        found.append(lost_by_stream(problem, plan, demand))
        factors = {"photo": 1.25, "face": 0.5}
        asked = replace(problem, demand=demand)
        found += [expected(asked, plan, factors), expected(asked, plan)]
        found += [bad_share(asked, plan, factors), bad_share(replace(problem, demand={}), plan)]
    kept(FILE, f"lost {seed}", condensed(found))


def solved(program, seed):
    """A solution in which each stream takes one path, on the workers that this needs."""
    m = program.program("accuracy", None)
    rng, values = random.Random(seed), np.zeros(m.size)
    g, problem = program.graph, program.problem
    busy = dict.fromkeys((kind.name for kind in problem.kinds), 0.0)
    for i, stream in enumerate(g.streams):
        share = rng.choice([1.0, 1.0, 0.5])
        values[program.share[i]] = share
        chosen = {}
        for j, path in enumerate(g.paths[problem.tree_of(stream).name]):
            same = all(
                chosen.get(p) is not None for p in ([path.parent] if path.parent >= 0 else [])
            )
            if same and path.task not in {p.task for p in chosen.values()}:
                chosen[j] = path
        for j, path in chosen.items():
            values[program.c[stream][j]] = share
            node = g.nodes[stream, path.task]
            able = [
                (k, w)
                for k, w in zip(node.configs, program.w[stream, path.task], strict=True)
                if g.configs[k].variant == path.variants[-1]
            ]
            if able:
                k, w = rng.choice(able)
                values[w] = share * problem.rate(stream) * path.arrivals / g.configs[k].throughput
                busy[g.configs[k].kind] += values[w]
    for i, kind in enumerate(problem.kinds):
        values[program.n[i]] = math.ceil(1.25 * busy[kind.name])
    for z, _ in program.budgets.values():
        values[z[-1]] = 1.0
    return Solution("feasible", 2.0, 2.5, values)


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_plans_of_solutions(seed, sharing):
    spot = seed % 4 == 3
    kinds = (
        Kind("gpu", 0, 40, 2.0, interruptions_per_hour=2.0 * spot),
        Kind("cpu", 1, 80, 0.5),
    )
    floor = 75.0 if seed % 2 else 0.0
    problem = photo(kinds=kinds, sharing=sharing, accuracy_floor=floor)
    limits = Limits({("", "gpu"): Room(0.875, 0.25)}) if seed % 3 else Limits()
    program = Program(problem, limits=limits)
    solution = solved(program, seed)
    uses = uses_of(program, solution)
    found = [uses, together(uses), rest_of(program, uses)]
    try:
        built = build(program, "share" if seed % 2 else "accuracy", solution)
    except (Unpacked, Blocked) as failed:
        found.append([str(failed), failed.workers])
    else:
        found += [built.unpriced, built.late, built.pools, built.workers, built.most]
        found += [built.too_full(target) for target in (0.001, 0.01, 0.2)]
    kept(FILE, f"built {seed}, {sharing}", condensed(found))


@pytest.mark.parametrize("times", [0.5, 1.0, 4.0])
def test_prices(times):
    """Of one kind of worker and one variant of each task, so that the duals are unique."""
    problem = photo()
    models = tuple(replace(m, variants=m.variants[:1]) for m in problem.models)
    tree = problem.trees[0]
    tasks = tuple(
        replace(t, factors={v: t.factors[v] for v in ("d-l",) if v in t.factors})
        for t in tree.tasks
    )
    trees = (replace(tree, tasks=tasks), *problem.trees[1:])
    demand = {"photo": Demand(11.0 * times), "face": Demand(7.0 * times)}
    kinds = (Kind("gpu", 0, 2, 2.0), Kind("cpu", 0, 0))
    problem = replace(problem, models=models, trees=trees, demand=demand, kinds=kinds)
    program = Program(problem)
    solution = program.solve("share", None)
    kept(FILE, f"prices {times}", prices_of(program, solution).__dict__)


def test_classes_of_sizes():
    rng, found = random.Random(2), []
    for _ in range(30):
        counts = {rng.randint(1, 64): rng.randint(1, 40) for _ in range(rng.randint(1, 12))}
        ends = rng.sample(range(1, 64), rng.randint(0, 3))
        found.append(classes_of(counts, ends, rng.randint(1, 5)))
    sizes = (Size(2, 1.5, 0.75), Size(6, 4.0, 0.25))
    problem = photo(communication_s=0.01)
    models = (problem.models[0], replace(problem.models[1], sizes=sizes))
    problem = replace(problem, models=models)
    found += [ends_of(problem, model) for model in problem.models]
    split = by_size(problem)
    found += [split.trees, split.demand, [size_of(problem, s) for s in split.streams]]
    served = {s: 0.25 + i / 8 for i, s in enumerate(split.streams)}
    rest = {"face": {"": 0.25, "≤2": 0.125, "gold≤6": 0.5}, "detect": {"": 1.0}}
    made = Plan({}, (), 80.0, served, 0.0, 1.0, Prices(), rest, "cost", "so")
    merged = without_sizes(made, problem)
    found += [merged.served, merged.rest_s]
    kept(FILE, "sizes", condensed(found))
