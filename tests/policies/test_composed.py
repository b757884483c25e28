"""What `composed` adds to policies: deadlines of tasks, and the choice of variants."""

import json
from dataclasses import replace

import pytest

from ray_slo.core import (
    Assigned,
    Cluster,
    DropReason,
    LatencyProfile,
    Model,
    Request,
    Variant,
    Worker,
)
from ray_slo.core.policy import PolicyWrapper, unwrapped, wrapper
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.policies.composed import Composed
from ray_slo.policies.registry import POLICIES, make_policy, policy_for, recipe_for
from ray_slo.policies.shared import fluid
from ray_slo.policies.shared.paths import parts_of, planned_batches
from ray_slo.simulation import Workload, simulate
from ray_slo.simulation.application import simulate_application
from tests.policies.harness import Host

CHAIN = Tree("det", (TreeTask("det", "det"), TreeTask("rec", "rec", "det")), {"": 0.1})
BOTH = frozenset({"quick", "good"})


def linear(first_ms, each_ms, most=32):
    return LatencyProfile.linear(each_ms / 1e3, first_ms / 1e3, most)


def model(slo_s=0.1):
    quick = Variant("quick", {"x": linear(5, 1)}, 70.0)
    good = Variant("good", {"x": linear(20, 2)}, 80.0)
    return Model("m", slo_s, (quick, good))


def host(workers, policy="eager", trees=(), models=None, **kwargs):
    made = lambda: Composed(make_policy(policy, kwargs), trees)  # noqa: E731
    return Host(made, Cluster.of(models or [model()], workers), strict=False)


def requests(count, at=0.0, slo_s=0.1, first=0):
    return [Request(first + i, "m", at, at + slo_s) for i in range(count)]


def variants(h):
    return [(s.variant, len(s.ids)) for s in h.sent]


# -- deadlines of tasks ----------------------------------------------------------------------------


def test_a_task_leaves_the_tasks_below_their_part_of_the_time():
    tree = Tree("a", (TreeTask("a", "a"), TreeTask("b", "b", "a")), {"": 0.16})
    parts = parts_of([tree], {"a": 0.02, "b": 0.06}, {"a": 0.005, "b": 0.01}, 0.0)
    assert parts["a"].deadline(0.0, 0.16) == pytest.approx(0.07)
    assert parts["a"].slos_s == pytest.approx((0.07,))
    assert parts["b"].deadline(0.03, 0.16) == pytest.approx(0.16)
    # Late at the frontend: half of the time, half of it for the rest; never less than it needs.
    assert parts["a"].deadline(0.0, 0.08) == pytest.approx(0.035)
    assert parts["a"].deadline(0.0, 0.012) == pytest.approx(0.002)


def test_of_several_children_the_slowest_counts():
    tasks = (TreeTask("a", "a"), TreeTask("b", "b", "a"), TreeTask("c", "c", "a"))
    tree = Tree("a", tasks, {"": 1.0, "gold": 0.4})
    parts = parts_of([tree], {"a": 0.1, "b": 0.1, "c": 0.25}, {"b": 0.01, "c": 0.02}, 0.05)
    assert parts["a"].deadline(0.0, 1.0) == pytest.approx(1 - 0.75 * 0.3 / 0.4)
    assert parts["a"].least_s == pytest.approx(0.07)
    assert parts["a"].slos_s == pytest.approx([s * (1 - 0.75 * 0.75) for s in (0.4, 1.0)])


def test_batches_are_planned_where_they_save_most():
    fixed, each = linear(20, 0.1), linear(0.1, 2)
    sizes = planned_batches(CHAIN, {"det": fixed, "rec": each}, 0.0)
    assert sizes["det"] == 32
    assert 2 * (fixed.latency(32) + each.latency(sizes["rec"])) <= 0.1
    assert planned_batches(CHAIN, {"rec": each}, 0.0) == {"rec": 24}


def pipeline(slo_s=0.1, workers=8):
    models = tuple(
        auto.Model(name, (auto.Variant(name, 90.0, {"default": linear(first, each)}),))
        for name, first, each in (("det", 10, 2), ("rec", 8, 1.5))
    )
    tree = replace(CHAIN, slos_s={"": slo_s})
    return auto.Problem(models, (tree,), {}, (auto.Kind("default", workers, workers),))


class Bare(PolicyWrapper):
    serves_tasks = True  # or so it says


@pytest.mark.parametrize("policy", ["deferred", "deferred_flex", "flex", "eager", "price"])
def test_every_policy_serves_a_pipeline_at_low_load(policy):
    problem = pipeline()
    kwargs = {"objective": "consolidate"} if policy.startswith("deferred") else {}
    bad = {}
    for composed in (False, True):
        made = make_policy(policy, kwargs)
        report = simulate_application(
            problem,
            {"det": Workload.poisson(400)},
            policy=Composed(made, problem.trees) if composed else Bare(made),
            planner=None,
            duration_s=2,
        )
        bad[composed] = report.bad_rate()
    assert bad[True] < 0.002
    if policy == "deferred":  # bare, it waits until the tasks below have no time left
        assert bad[False] > 0.05


ALONE = {"det": (10, 2), "rec": (8, 1.5)}  # 12 ms, then 9.5 ms


@pytest.mark.parametrize("policy", [p for p in sorted(POLICIES) if p != "pipeline"])
def test_what_cannot_be_in_time_at_the_end_of_its_path_is_refused_at_once_at_the_root(policy):
    models = [
        Model(name, 0.1, (Variant(name, {"x": linear(*times)}, 90.0),))
        for name, times in ALONE.items()
    ]
    kwargs = {"timeout_ms": 1.0} if policy == "timeout" else {}
    h = host([Worker("w", "x", frozenset(ALONE))], policy, [CHAIN], models, **kwargs)
    h.arrive([Request(0, "det", 0.0, 0.021, 1, "det")])
    assert h.dropped[0] == (0.0, DropReason.WOULD_MISS)
    h.advance(1.0)
    assert not h.sent
    h.arrive([Request(1, "det", 1.0, 1.0226, 1, "det")])
    h.advance(2.0)
    assert variants(h) == [("det", 1)]


def test_every_request_has_deadlines_of_its_own_whatever_its_class():
    tree = replace(CHAIN, slos_s={"": 0.4, "gold": 0.1})
    parts = parts_of([tree], {"det": 0.03, "rec": 0.03}, {"det": 0.01, "rec": 0.01}, 0.0)
    kept = 0.75 / 2  # for the task below
    assert parts["det"].deadline(0.0, 0.1) == pytest.approx(0.1 * (1 - kept))
    assert parts["det"].deadline(0.0, 0.4) == pytest.approx(0.4 * (1 - kept))


# -- choice of variants ----------------------------------------------------------------------------


def test_at_low_load_all_requests_get_the_accurate_variant():
    h = host([Worker("w", "x", BOTH)])
    for i in range(20):
        h.arrive(requests(1, i * 0.1, first=i))
        h.advance((i + 1) * 0.1)
    assert set(variants(h)) == {("good", 1)}


def test_what_the_accurate_variant_cannot_serve_in_time_goes_to_the_quick_one():
    h = host([Worker("w", "x", BOTH)])
    h.arrive(requests(1, slo_s=0.01))  # the accurate one takes 22 ms
    assert variants(h) == [("quick", 1)]
    assert h.sent[0].finish_at == pytest.approx(0.006)
    h.arrive(requests(1, slo_s=0.005, first=1))
    h.advance(1.0)
    assert 1 in h.dropped  # too short for both


def test_what_the_policy_would_drop_is_tried_on_the_quick_variant_first():
    h = host([Worker("w", "x", BOTH)], max_batch_size=4)
    h.arrive(requests(7, slo_s=0.045))  # 28 ms and another 22 ms are too long
    h.advance(1.0)
    assert variants(h) == [("good", 4), ("quick", 3)]
    assert not h.dropped


def assigned(name, variant, load, size=4):
    return Worker(name, "x", BOTH, (Assigned(variant, size, load),))


def test_requests_are_shared_out_as_the_plan_says():
    # Nobody idles: each lane gets what is planned for it, and 50 a second more go in proportion.
    workers = [assigned("a", "good", 50.0, 1), assigned("b", "quick", 100.0, 1)]
    workers = [replace(w, loaded=frozenset({w.assigned[0].variant})) for w in workers]
    h = host(workers, "deferred", objective="consolidate")
    for i in range(300):
        h.arrive(requests(1, i / 150, first=i))
        h.advance((i + 1) / 150)
    h.advance(10.0)
    served = {v: sum(n for w, n in variants(h) if w == v) for v in BOTH}
    assert served["good"] + served["quick"] == 300
    assert 90 <= served["good"] <= 140  # planned: 100; it has room for some more
    assert {(s.worker, s.variant) for s in h.sent} == {("a", "good"), ("b", "quick")}


def burst_of(count, loaded, planned=(50.0, 100.0)):
    """Requests that come at once after a second of the planned rate; how many were refused, and
    who ran what."""
    good, quick = planned
    workers = [assigned("a", "good", good, 8), assigned("b", "good", good, 8)]
    workers += [assigned("c", "quick", quick, 8)] if quick else []
    workers = [replace(w, loaded=frozenset({w.assigned[0].variant}) | loaded) for w in workers]
    h = host(workers, "deferred")
    rate = round(2 * good + quick)
    for i in range(rate):
        h.arrive(requests(1, i / rate, first=i))
        h.advance((i + 1) / rate)
    h.arrive(requests(count, 1.0, first=rate))
    h.advance(3.0)
    served = {v: sum(n for w, n in variants(h) if w == v) for v in BOTH}
    return rate + count - sum(served.values()), {(s.worker, s.variant) for s in h.sent}


def test_in_a_burst_workers_turn_to_the_quick_variants_that_they_have_in_reserve():
    refused, _ = burst_of(100, frozenset(), (200.0, 0.0))
    fewer, who = burst_of(100, frozenset({"quick"}), (200.0, 0.0))
    assert refused > 30
    assert fewer == 0
    assert ("a", "quick") in who


def test_a_burst_leaves_no_planned_quick_variant_unused():
    refused, who = burst_of(60, frozenset())
    assert refused == 0
    assert who == {("a", "good"), ("b", "good"), ("c", "quick")}


def test_without_a_burst_the_reserve_is_not_used():
    _, who = burst_of(0, frozenset({"quick"}), (200.0, 0.0))
    assert who == {("a", "good"), ("b", "good")}


def test_idle_workers_of_the_accurate_variant_are_filled_before_others():
    h = host([assigned("a", "good", 1.0), assigned("b", "quick", 100.0)], "deferred")
    h.arrive(requests(4))  # a batch, of which the plan has one request a second
    h.advance(1.0)
    assert {s.variant for s in h.sent} == {"good"}


def test_requests_of_a_variant_that_nobody_runs_any_more_go_to_another():
    workers = [Worker("a", "x", frozenset({"good"})), Worker("b", "x", frozenset({"quick"}))]
    h = host(workers, "deferred", objective="consolidate")
    h.arrive(requests(3))
    h.change(Cluster.of([model()], workers[1:]))
    h.advance(1.0)
    assert (sum(n for _, n in variants(h)), {v for v, _ in variants(h)}) == (3, {"quick"})


def test_ten_models_on_one_pool_come_near_the_fluid_limit():
    quick, good = linear(6, 1, 64), linear(15, 3, 64)
    rate = 674.0
    models = [
        auto.Model(
            f"m{i}",
            (
                auto.Variant(f"q{i}", 70.0, {"default": quick}),
                auto.Variant(f"s{i}", 80.0, {"default": good}),
            ),
        )
        for i in range(10)
    ]
    trees = tuple(Tree.of_model(m.name, {"": 0.1}) for m in models)
    problem = auto.Problem(tuple(models), trees, {}, (auto.Kind("default", 16, 16),))
    report = simulate_application(
        problem,
        {m.name: Workload.poisson(rate) for m in models},
        policy=policy_for("deferred", {}, trees, {m.name: 2 for m in models}),
        planner=None,
        duration_s=3,
    )
    plain = [
        Model(m.name, 0.1, tuple(Variant(v.name, v.profiles, v.accuracy) for v in m.variants))
        for m in models
    ]
    rates = {m.name: rate for m in models}
    limit = fluid.solve(fluid.Problem(plain, rates, {"default": 16})).accuracy
    assert limit == pytest.approx(75.2, abs=0.1)
    assert report.bad_rate() < 0.005
    assert 100 * report.value() > 0.97 * limit


# -- which policies are composed -------------------------------------------------------------------


@pytest.mark.slow
def test_overload_of_several_models_is_left_to_the_quick_variants():
    """A plan that has room for some models only leaves the others their quick variants, too."""
    times = {"quick": (0.001, 0.006, 70.0), "good": (0.003, 0.015, 80.0)}

    def models(names):
        return [
            Model(
                f"m{i}",
                0.1,
                tuple(
                    Variant(f"{v}{i}", {"default": LatencyProfile.linear(a, b, 64)}, accuracy)
                    for v, (a, b, accuracy) in times.items()
                    if v in names
                ),
            )
            for i in range(6)
        ]

    workload = Workload.poisson(1.4 * 8 * 64 / 0.07)
    both, quick = (
        simulate(
            policy_for("deferred", variants={f"m{i}": len(names) for i in range(6)}),
            Cluster.uniform(models(names), 8),
            workload,
            duration_s=2.5,
            warmup_s=1.5,
            seed=12,
        )
        for names in (("quick", "good"), ("quick",))
    )
    assert both.bad_rate() < quick.bad_rate() + 0.03


@pytest.mark.parametrize(
    ("policy", "kwargs", "trees", "variants", "composed"),
    [
        ("deferred", {}, (), {}, False),
        ("deferred", {}, (Tree.of_model("m", {"": 0.1}),), {"m": 1}, False),
        ("deferred", {}, (), {"m": 2}, True),
        ("deferred", {}, (CHAIN,), {}, True),
        ("price", {}, (), {"m": 2}, False),
        ("price", {}, (CHAIN,), {}, True),
        ("eager", {}, (CHAIN,), {}, False),
        ("pipeline", {"parents": {"det": None, "rec": "det"}}, (CHAIN,), {"det": 2}, False),
    ],
)
def test_a_policy_is_composed_with_what_it_lacks(policy, kwargs, trees, variants, composed):
    made = policy_for(policy, kwargs, trees, variants)
    assert (wrapper(made, Composed) is not None) == composed
    assert getattr(made, "for_pipelines", False) == (policy == "pipeline")


def test_a_composed_policy_can_be_made_anew_from_a_log():
    tree = replace(CHAIN, slos_s={"": 0.1, "gold": 0.05}, path_accuracies={("d", "r"): 70.0})
    name, kwargs = recipe_for("deferred", {"margin_ms": 1.0}, (tree,), communication_s=0.001)
    made = make_policy(name, json.loads(json.dumps(kwargs)))
    assert wrapper(made, Composed) is not None
    assert Tree.from_json(json.loads(json.dumps(tree.to_json()))) == tree
    assert vars(unwrapped(made))["_margin_s"] == pytest.approx(0.001)
    assert recipe_for("eager", {}, (tree,)) == ("eager", {})
    planned, arguments = recipe_for("eager", {}, (tree,), planned=True)
    assert wrapper(make_policy(planned, arguments), Composed) is not None
