import doctest
import itertools
import math
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import poisson

from benchmarks.loki import published
from benchmarks.loki import terms as loki
from benchmarks.loki.terms import Plan, Problem, Task, Variant, capacity, fastest, plan
from benchmarks.loki.terms.plans import workers_of
from ray_slo.core.profiles import LatencyProfile
from ray_slo.papers.routing import most_accurate_first
from ray_slo.planning import Infeasible
from ray_slo.planning.milp import Milp, Solution
from tests.planning.examples.loki import chain, linear, tree

GUROBI = find_spec("gurobipy") is not None
BACKENDS = ["highs", "gurobi"] if GUROBI else ["highs"]


def served(problem, any_route=True):
    """The plan, or the best effort. Without `any_route`, that of the published program."""
    if not any_route:
        return published.plan(problem, any_route=False)[0]
    made = plan(problem)
    return made.best_effort if isinstance(made, Infeasible) else made


def check(problem, made):
    """The constraints of §4, from what the plan itself says; not from the program's matrices."""
    variants = {v.name: (t.name, v) for t in problem.tasks for v in t.variants}
    assert made.workers <= problem.workers
    of_sink = {}
    for path in made.paths:
        of_sink.setdefault(variants[path.variants[-1]][0], []).append(path)
        assert problem.waiting_factor * path.latency_s + problem.communication_s * len(
            path.variants
        ) <= problem.slo_s * (1 + 1e-9)
    tasks = {t.name for t in problem.tasks}
    sinks = tasks - {t.parent for t in problem.tasks}
    kept = 1 - made.shed_share
    for sink in sinks if kept > 0 else ():
        assert sum(p.share for p in of_sink[sink]) == pytest.approx(kept, abs=1e-4)
        # The root's variants have the same shares, whichever sink is looked at.
        for v in problem.order[0].variants:
            shares = [
                sum(p.share for p in of_sink[s] if p.variants[0] == v.name) for s in sorted(sinks)
            ]
            np.testing.assert_allclose(shares, shares[0], atol=1e-4)
    load = {}
    for sink, paths in of_sink.items():
        for path in paths:
            arrivals = made.planned_demand * path.share
            for name, following in itertools.zip_longest(path.variants, path.variants[1:]):
                load[sink, name] = load.get((sink, name), 0.0) + arrivals
                if following:
                    arrivals *= variants[name][1].factors.get(variants[following][0], 1.0)
    for (_, name), requests in load.items():
        capacity_ = sum(a.workers * a.throughput for a in made.assignments if a.variant == name)
        assert requests <= capacity_ * (1 + 1e-4)
    for a in made.assignments:
        assert a.load <= a.workers * a.throughput * (1 + 1e-4)
        assert a.batch_size in problem.batch_sizes
    mean = sum(p.share * p.accuracy for p in made.paths) / len(sinks)
    assert made.accuracy * kept == pytest.approx(mean, abs=1e-2)


def brute_force(problem, most_accurate=False, any_route=True):
    """(fewest workers at the demand or ∞, best accuracy or −∞, largest share served): every count
    of workers per (variant, batch size), and for each a small program over edges of a chain."""
    root, child = problem.order
    limit = (problem.slo_s - 2 * problem.communication_s) / problem.waiting_factor

    def options(task):
        best = max(v.accuracy for v in task.variants)
        return [
            (v, b)
            for v in task.variants
            for b in problem.batch_sizes
            if not most_accurate or v.accuracy == best
        ]

    first, second = options(root), options(child)
    both = first + second
    edges = [
        (i, j)
        for i, (v, b) in enumerate(first)
        for j, (w, a) in enumerate(second)
        if v.profile(b) + w.profile(a) <= limit + 1e-12
    ]
    use = np.zeros((len(both), len(edges)))
    value = np.zeros(len(edges))
    for e, (i, j) in enumerate(edges):
        factor = first[i][0].factors[child.name]
        use[i, e] = problem.planned_demand
        use[len(first) + j, e] = problem.planned_demand * factor
        value[e] = first[i][0].accuracy * second[j][0].accuracy / 100
    rates = np.array([v.profile.throughput(b) for v, b in both])
    fewest, accuracy, share = math.inf, -math.inf, 0.0
    for total in range(1, problem.workers + 1):
        for chosen in itertools.combinations_with_replacement(range(len(both)), total):
            hosted = set(chosen)
            if chosen[0] >= len(first) or chosen[-1] < len(first):
                continue
            if any_route and (
                len({both[c][0].name for c in hosted}) < len(hosted)
                or any(
                    (i, j - len(first)) not in edges
                    for i in hosted
                    for j in hosted
                    if i < len(first) <= j
                )
            ):
                continue
            room = np.bincount(chosen, minlength=len(both)) * rates
            most = linprog(-np.ones(len(edges)), use, room, bounds=(0, None))
            share = max(share, min(-most.fun, 1.0))
            if -most.fun < 1 - 1e-9:
                continue
            fewest = min(fewest, total)
            if not most_accurate:
                best = linprog(-value, use, room, np.ones((1, len(edges))), [1.0])
                accuracy = max(accuracy, -best.fun)
    return fewest, accuracy, share


def test_doctest():
    assert doctest.testmod(loki).failed == 0


@pytest.mark.parametrize(("demand", "step"), [(40, "hardware"), (180, "accuracy"), (400, "share")])
@pytest.mark.parametrize("any_route", [True, False])
def test_as_brute_force(demand, step, any_route):
    problem = chain(
        demand=demand,
        workers=3,
        slo_s=0.13,  # batches of 4 in the large detector leave the classifiers 7 ms
        batch_sizes=(1, 4),
        relative_gap=1e-7,
    )
    fewest, _, _ = brute_force(problem, True, any_route)
    assert math.isinf(fewest) == (step != "hardware")
    if step != "hardware":
        _, accuracy, share = brute_force(problem, False, any_route)
        assert (math.isinf(accuracy), share < 1) == (step == "share", step == "share")
    for backend in BACKENDS:
        made = served(replace(problem, backend=backend), any_route)
        check(problem, made)
        assert made.step == step
        if step == "hardware":
            assert made.workers == fewest
        elif step == "accuracy":
            assert made.accuracy == pytest.approx(accuracy, abs=1e-3)
        else:
            assert 1 - made.shed_share == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize("demand", [20, 80, 150, 300, 600])
def test_trees_keep_the_constraints(demand):
    problem = tree(demand=demand)
    check(problem, served(problem))


def test_three_levels_deep():
    one = chain(workers=8, slo_s=0.3)
    detect, classify = one.tasks
    classify = replace(
        classify, variants=tuple(replace(v, factors={"last": 0.5}) for v in classify.variants)
    )
    last = Task("last", (Variant("z", 100.0, linear(2, 2)),), "classify")
    problem = replace(one, tasks=(last, classify, detect))
    made = plan(problem)
    assert isinstance(made, Plan)
    check(problem, made)
    assert {len(p.variants) for p in made.paths} == {3}
    of_last = sum(a.load for a in made.assignments if a.task == "last")
    of_classify = sum(a.load for a in made.assignments if a.task == "classify")
    assert of_last == pytest.approx(0.5 * of_classify)


def test_capacity_is_where_steps_end():
    problem = chain()
    hardware, most = capacity(problem, most_accurate=True), capacity(problem)
    assert 0 < hardware < most
    for limit, below, above in ((hardware, "hardware", "accuracy"), (most, "accuracy", "share")):
        assert served(replace(problem, demand=limit * 0.999)).step == below
        assert served(replace(problem, demand=limit * 1.001)).step == above


def test_any_route_is_fast_enough():
    """What Algorithm 1 makes of a plan: it routes by accuracy alone. The published program accepts
    paths that only its own shares avoid."""
    slow = {True: 0.0, False: 0.0}
    for any_route, demand in itertools.product(slow, (90, 120, 150, 180)):
        problem = chain(demand=demand, workers=6, slo_s=0.1)
        made = served(problem, any_route)
        check(problem, made)
        workers = {w.id: w for w in workers_of(problem, made)}
        tables = most_accurate_first(
            {"detect": None, "classify": "detect"}, workers.values(), demand
        )
        assert sum(tables.unrouted.values()) <= 1e-4 * demand
        for sender, by_child in tables.tables.items():
            for entry in by_child.get("classify", ()):
                time = workers[sender].execution_s + workers[entry.worker].execution_s
                slow[any_route] += (2 * time > problem.slo_s + 1e-9) * entry.probability
        if any_route:
            names = [a.variant for a in made.assignments]
            assert len(set(names)) == len(names)
    assert slow[True] == 0
    assert slow[False] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 4])
def test_random_trees(seed):
    """a → b → c and a → d: the constraints hold, so do all routes, and the solvers agree."""
    rng = np.random.default_rng(seed)
    parents = {"a": None, "b": "a", "c": "b", "d": "a"}

    def variant(task, i):
        return Variant(
            f"{task}{i}",
            round(rng.uniform(60, 100), 1),
            linear(*rng.uniform(1, 8, 2)),
            {c: round(rng.uniform(0, 3), 2) for c, p in parents.items() if p == task},
        )

    tasks = [Task(t, tuple(variant(t, i) for i in range(2)), p) for t, p in parents.items()]
    problem = Problem(tuple(tasks), 1.0, 6, 0.08, batch_sizes=(1, 2, 4), relative_gap=1e-7)
    most = capacity(problem)
    for share in (0.3, 0.8, 1.2):
        asked = replace(problem, demand=share * most)
        made = served(asked)
        check(asked, made)
        hosted = {t: [a for a in made.assignments if a.task == t] for t in parents}
        for path in (("a", "b", "c"), ("a", "d")):
            for combination in itertools.product(*(hosted[t] for t in path)):
                assert 2 * sum(a.latency_s for a in combination) <= asked.slo_s + 1e-9
        free = served(asked, any_route=False)
        check(asked, free)
        assert free.accuracy >= made.accuracy - 1e-2 or free.shed_share < made.shed_share - 1e-4
        if GUROBI:
            other = served(replace(asked, backend="highs"))
            assert (other.step, other.workers if other.step == "hardware" else 0) == (
                made.step,
                made.workers if made.step == "hardware" else 0,
            )
            assert other.accuracy == pytest.approx(made.accuracy, abs=1e-2)
            assert other.shed_share == pytest.approx(made.shed_share, abs=1e-4)


def test_the_share_that_is_shed():
    problem = chain(demand=1000.0)
    made = plan(problem)
    assert isinstance(made, Infeasible)
    assert made.proven
    best = made.best_effort
    assert best.shed_share == pytest.approx(1 - capacity(problem) / 1000, abs=1e-3)
    assert "1000 req/s" in made.reason
    assert "is shed" in best.explanation
    check(problem, best)


def test_a_solver_that_runs_out_of_time_has_proven_nothing(monkeypatch):
    def nothing(self, *args, **kwargs):
        return Solution("unknown", math.nan, math.nan, np.zeros(0))

    monkeypatch.setattr(Milp, "solve", nothing)
    made = plan(chain())
    assert isinstance(made, Infeasible)
    assert not made.proven
    assert made.reason == "the solver stopped at its time limit without a plan"
    assert made.best_effort.assignments == ()


def test_nothing_is_fast_enough():
    problem = chain(slo_s=0.02)
    made = plan(problem)
    assert isinstance(made, Infeasible)
    assert made.proven
    assert made.best_effort.shed_share == 1
    assert made.best_effort.assignments == ()
    # 2 · (10 ms + 4 ms): the small detector, then the small classifier.
    assert fastest(problem) == pytest.approx(0.028)
    assert "0.028 s" in made.reason


def test_waiting_and_communication_use_up_the_slo():
    assert fastest(chain(waiting_factor=1.0, communication_s=0.003)) == pytest.approx(0.020)
    problem = chain(slo_s=0.034, communication_s=0.003, demand=1.0)
    assert isinstance(plan(problem), Plan)
    assert isinstance(plan(replace(problem, communication_s=0.0031)), Infeasible)
    relaxed = capacity(chain(slo_s=0.03, waiting_factor=1.0))
    assert relaxed > capacity(chain(slo_s=0.03)) * 1.1


def test_headroom_is_a_quantile_of_arrivals():
    problem = chain(demand=20.0, headroom_quantile=0.99, headroom_period_s=2.0)
    assert problem.planned_demand == poisson.ppf(0.99, 40) / 2
    made = served(problem)
    assert made.planned_demand == problem.planned_demand
    assert "average 20" in made.explanation
    check(problem, made)
    assert sum(a.load for a in made.assignments if a.task == "detect") == pytest.approx(
        problem.planned_demand
    )


def test_an_accuracy_floor_sheds():
    free = served(chain(demand=200.0))
    floor = free.accuracy + 3
    made = plan(chain(demand=200.0, accuracy_floor=floor))
    assert isinstance(made, Infeasible)
    assert made.best_effort.accuracy >= floor - 1e-2
    assert 0 < made.best_effort.shed_share < 1
    assert f"at least {floor:g} %" in made.reason
    check(chain(demand=200.0), made.best_effort)


def test_measured_accuracies_decide():
    """Multiplied, d-large wins; measured, it is no better with c-small than d-small is."""
    problem = chain(demand=150.0)
    product = served(problem)
    measured = {("d-large", c): 10.0 for c in ("c-large", "c-middle", "c-small")}
    other = served(replace(problem, path_accuracies=measured))
    assert any(a.variant == "d-large" for a in product.assignments)
    assert not any(a.variant == "d-large" for a in other.assignments)
    check(replace(problem, path_accuracies=measured), other)


def test_swaps_are_bounded():
    before = served(chain(demand=90.0))
    then = chain(demand=300.0, current=before.loaded)
    free = served(then)
    assert free.swaps >= 2
    bounded = served(replace(then, max_swaps=1))
    assert bounded.swaps <= 1
    assert bounded.shed_share > 0 or bounded.accuracy <= free.accuracy + 1e-2
    none = served(replace(then, max_swaps=0))
    assert none.swaps == 0
    assert set(none.loaded) <= set(before.loaded)
    assert none.shed_share >= bounded.shed_share - 1e-4


def test_swaps_cost():
    """A swap that gains less than it costs is not made."""
    before = served(chain(demand=150.0))
    then = chain(demand=140.0, current=before.loaded)
    free, dear = served(then), served(replace(then, swap_cost=50.0))
    assert dear.swaps <= free.swaps
    assert dear.swaps == 0
    assert dear.accuracy - 50 * dear.swaps >= free.accuracy - 50 * free.swaps - 1e-2
    check(then, dear)


def test_loading_idle_workers_is_no_swap():
    before = served(chain(demand=30.0))
    assert before.workers < 3
    then = served(chain(demand=60.0, current=before.loaded, max_swaps=0))
    assert then.step == "hardware"
    assert then.workers > before.workers
    assert then.swaps == 0


def test_no_demand_needs_no_workers():
    made = plan(chain(demand=0.0))
    assert isinstance(made, Plan)
    assert made.workers == 0
    assert made.shed_share == 0


def test_profiles_that_are_not_monotone_in_throughput():
    """Batches that take more time and serve no more per second are never configured."""
    dip = LatencyProfile([0.010, 0.030, 0.031, 0.032])  # 100, 67, 97, 125 per second
    problem = Problem(
        (Task("only", (Variant("v", 90.0, dip),)),), 110.0, 2, 0.5, batch_sizes=(1, 2, 3, 4)
    )
    made = plan(problem)
    assert isinstance(made, Plan)
    assert [(a.batch_size, a.workers) for a in made.assignments] == [(4, 1)]
    assert capacity(problem) == pytest.approx(250)


def _task(name, parent=None, **factors):
    return Task(name, (Variant(f"v-{name}", 90.0, linear(1, 1), factors),), parent)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"demand": -1.0}, "demand must be at least 0, got -1"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"slo_s": 0.0}, "slo_s must be positive, got 0"),
        ({"waiting_factor": 0.5}, "waiting_factor must be at least 1"),
        ({"headroom_quantile": 1.0}, "headroom_quantile must be above 0 and below 1, got 1"),
        ({"batch_sizes": ()}, "batch_sizes must be"),
        ({"any_route": False}, "any_route must be true"),
        ({"max_swaps": -1}, "max_swaps must be at least 0, got -1"),
        ({"current": {("detect", "x"): 1}}, "current: no such variants"),
        ({"current": {("detect", "d-large"): -1}}, "current must count at least 0"),
        ({"tasks": ()}, "tasks must be at least one"),
        ({"tasks": (_task("a"), _task("b"))}, "tasks must have one root"),
        ({"tasks": (_task("a"), _task("b", "x"))}, "parent of task 'b' must be one of"),
        ({"tasks": (_task("a"), _task("b", "c"), _task("c", "b"))}, "must be a tree"),
        ({"tasks": (_task("a", z=1.0),)}, "factors of variant 'v-a': no children"),
        ({"tasks": (_task("a", b=-1.0), _task("b", "a"))}, "factors of variant 'v-a' must be"),
        ({"tasks": (Task("a", ()),)}, "variants of task 'a'"),
        (
            {"tasks": (Task("a", (Variant("v", 101.0, linear(1, 1)),)),)},
            "accuracy of variant 'v' must be 0 to 100 percent, got 101",
        ),
        (
            {"tasks": (_task("a"), replace(_task("b", "a"), variants=_task("a").variants))},
            r"names of their own in the pipeline: \['v-a'\]",
        ),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        replace(chain(), **options)


@pytest.mark.parametrize(("most", "size"), [(40, 40), (64, 64), (200, 64)])
def test_batches_have_up_to_64_requests_or_as_many_as_were_measured(most, size):
    task = Task("t", (Variant("v", 90.0, LatencyProfile.linear(0.001, 0.1, most)),))
    made = plan(Problem((task,), demand=250.0, workers=1, slo_s=2.0, headroom_quantile=None))
    (assigned,) = made.assignments
    assert (assigned.batch_size, assigned.workers) == (size, 1)
    assert assigned.latency_s == pytest.approx(0.1 + 0.001 * size)
    assert assigned.throughput == pytest.approx(size / assigned.latency_s)
