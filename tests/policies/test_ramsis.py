"""`ramsis`: queues, tables in force, groups of workers. The contract is `test_contract`'s."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from ray_slo.core import Cluster, DropReason, LatencyProfile, Model, Request, Variant, Worker
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.papers.ramsis import Problem
from ray_slo.papers.ramsis import solve as optimal
from ray_slo.papers.ramsis.arrivals import Gamma as Bursts
from ray_slo.policies import make_policy
from ray_slo.policies.ramsis import Ramsis
from ray_slo.policies.registry import policy_for
from ray_slo.simulation import Workload, simulate
from ray_slo.simulation.arrivals import Gamma
from tests.policies.harness import Host
from tests.policies.tables import OfProblem, solve

FAST, SLOW = LatencyProfile.linear(0.02, 0.0, 8), LatencyProfile.linear(0.06, 0.0, 8)


def model(name: str = "m", slo_s: float = 0.1, **profiles: LatencyProfile) -> Model:
    """Variants of 70 % and 80 %, 20 and 60 ms per request."""
    named = profiles or {"fast": FAST, "slow": SLOW}
    return Model(
        name,
        slo_s,
        tuple(
            Variant(v if name == "m" else f"{name}-{v}", {"default": p}, 70.0 + 10 * i)
            for i, (v, p) in enumerate(named.items())
        ),
    )


def cluster(workers: int, *models: Model) -> Cluster:
    return Cluster.uniform(models or [model()], workers)


def requests(*times: float, name: str = "m", slo: float = 0.1, start: int = 0) -> list[Request]:
    return [Request(start + i, name, t, t + slo) for i, t in enumerate(times)]


@dataclass(frozen=True)
class Fixed(OfProblem):
    """A table that always says the same."""

    problem: Problem
    says: tuple[str, int]

    def lookup(self, n: int, slack_s: float) -> tuple[str, int]:
        return self.says


def table(rate: float, says: str, workers: int = 1, size: int = 8, slo_s: float = 0.1) -> Fixed:
    variants = (("fast", 70.0, FAST), ("slow", 80.0, SLOW))
    return Fixed(Problem(variants, slo_s, rate, workers), (says, size))


@dataclass
class Solver:
    """`solve`, and what it was asked."""

    asked: list[Problem] = field(default_factory=list)

    def __call__(self, problem: Problem):
        self.asked.append(problem)
        return solve(problem)


def dispatched(host: Host) -> list[tuple[str, list[int]]]:
    return [
        (a.variant, [r.id for r in a.requests])
        for d in host.decisions
        for a in d.actions
        if hasattr(a, "variant")
    ]


# Tables ------------------------------------------------------------------------------------------


def test_the_lowest_load_that_covers_is_in_force():
    tables = [table(40.0, "fast", size=3), table(10.0, "slow"), table(20.0, "fast", size=2)]
    for load, says in [(5.0, ("slow", [0])), (10.0, ("slow", [0])), (15.0, ("fast", [0, 1]))]:
        host = Host(
            lambda load=load: Ramsis(tables=tables, load_rps=load), cluster(1), strict=False
        )
        host.arrive(requests(0.0, 0.0, 0.0))
        if says[0] == "slow":  # three or even two of them would be late in "slow"
            assert dispatched(host) == [("fast", [0, 1, 2])]
        else:
            assert dispatched(host) == [says]


def test_the_measured_load_chooses_the_table():
    tables = [table(10.0, "slow", size=1), table(60.0, "fast", size=1)]
    host = Host(lambda: Ramsis(tables=tables, solver=None), cluster(1), strict=False)
    host.run(requests(*[0.2 * i for i in range(40)]))
    assert Counter(v for v, _ in dispatched(host)) == {"slow": 39, "fast": 1}  # nothing known yet
    host.run(requests(*[8.0 + 0.025 * i for i in range(200)], start=100))
    assert {v for v, _ in dispatched(host)[-100:]} == {"fast"}


def test_loads_are_rounded_up_to_a_grid_and_solved_once_each():
    solver = Solver()
    policy = Ramsis(solver=solver, load_step=1.25)
    report = simulate(policy, cluster(4), Workload.poisson(60.0), duration_s=20.0)
    rates = [p.rate for p in solver.asked]
    assert len(rates) == len(set(rates)) <= 6
    assert all(p.num_workers == 4 and p.late == "drop" for p in solver.asked)
    assert any(60.0 <= r <= 75.0 for r in rates)
    assert report.accuracy > 71


def test_without_solver_the_host_is_asked_and_the_nearest_safe_table_serves():
    host = Host(
        lambda: Ramsis(tables=[table(10.0, "slow", size=1)], solver=None, load_rps=30.0),
        cluster(1),
        strict=False,
    )
    host.arrive(requests(0.0))
    (wanted,) = host.policy.wanted()
    assert (wanted.rate, wanted.num_workers, wanted.slo_s) == (30.0, 1, 0.1)
    host.policy.solved(0.05, [Fixed(wanted, ("fast", 1))])
    assert host.policy.wanted() == []
    host.run(requests(0.1, start=1))
    assert [v for v, _ in dispatched(host)] == ["slow", "fast"]


def test_without_any_table_the_fastest_serves():
    host = Host(lambda: Ramsis(solver=None, load_rps=1.0), cluster(1), strict=False)
    host.run(requests(0.0, 0.001, 0.002))
    assert dispatched(host) == [("fast", [0]), ("fast", [1, 2])]


def test_a_table_that_sheds_does_not_shed_the_only_request_of_an_idle_system():
    host = Host(lambda: Ramsis(tables=[table(10.0, "", size=1)], load_rps=5.0), cluster(1))
    host.run(requests(0.0, 0.5))
    assert dispatched(host) == [("fast", [0]), ("fast", [1])]
    host.run(requests(1.0, 1.0, 1.0, start=2))
    assert [i for i, (_, why) in host.dropped.items() if why is DropReason.SHED] == [2, 3]


def test_fewer_workers_look_tables_up_by_the_load_per_worker():
    tables = [table(40.0, "slow", workers=4, size=1), table(200.0, "fast", workers=4, size=1)]
    host = Host(lambda: Ramsis(tables=tables, load_rps=36.0), cluster(4), strict=False)
    host.arrive(requests(0.0))
    host.change(cluster(2))
    host.arrive(requests(0.0, start=1))
    assert [v for v, _ in dispatched(host)] == ["slow", "fast"]


def test_other_workers_are_solved_for_anew():
    solver = Solver()
    host = Host(lambda: Ramsis(solver=solver, load_rps=36.0), cluster(4), strict=False)
    host.arrive(requests(0.0))
    host.change(cluster(2))
    host.arrive(requests(0.0, start=1))
    assert [(p.num_workers, p.rate) for p in solver.asked] == [(4, 36.0), (2, 36.0)]


def test_tables_outlive_an_outage():
    solver = Solver()
    host = Host(lambda: Ramsis(solver=solver, load_rps=36.0), cluster(2), strict=False)
    host.run(requests(0.0))
    host.change(cluster(0))
    host.change(cluster(2))
    host.run(requests(host.now, start=1))
    assert len(host.timeline()) == 2
    assert len(solver.asked) == 1


@pytest.mark.parametrize(("factor", "problems"), [(1.05, 1), (1.5, 2)])
def test_a_profile_that_drifts_makes_tables_stale(factor, problems):
    solver = Solver()
    host = Host(lambda: Ramsis(solver=solver, load_rps=5.0), cluster(1), strict=False)
    host.arrive(requests(0.0))
    host.advance(1.0)
    slower = model(fast=FAST.scaled(factor), slow=SLOW.scaled(factor))
    host.change(cluster(1, slower))
    host.arrive(requests(1.0, start=1))
    assert len(solver.asked) == 1  # not so soon after it was solved
    host.advance(11.0)
    host.arrive(requests(11.0, start=2))
    assert len(solver.asked) == problems
    assert dispatched(host) == [("slow", [0]), ("slow", [1]), ("slow", [2])]


def test_after_another_order_of_accuracies_tables_are_solved_at_once():
    solver = Solver()
    host = Host(lambda: Ramsis(solver=solver, load_rps=5.0), cluster(1), strict=False)
    host.run(requests(0.0))
    known = model()
    turned = [replace(v, accuracy=150.0 - v.accuracy) for v in known.variants]
    host.change(cluster(1, replace(known, variants=tuple(turned))))
    host.run(requests(host.now, start=1))
    asked = [[(name, accuracy) for name, accuracy, _ in p.variants] for p in solver.asked]
    assert asked == [[("fast", 70), ("slow", 80)], [("slow", 70), ("fast", 80)]]
    assert [v for v, _ in dispatched(host)] == ["slow", "fast"]


def test_a_table_that_arrives_after_profiles_moved_a_little_is_used():
    make = lambda: Ramsis(solver=None, load_rps=5.0)  # noqa: E731
    host = Host(make, cluster(1), strict=False)
    host.run(requests(0.0))
    (wanted,) = host.policy.wanted()
    host.change(cluster(1, model(fast=FAST.scaled(1.01), slow=SLOW.scaled(1.01))))
    host.run(requests(host.now, start=1))
    assert host.policy.wanted() == [wanted]
    host.policy.solved(host.now, [solve(wanted)])
    assert host.policy.wanted() == []
    host.run(requests(host.now, start=2))
    assert [v for v, _ in dispatched(host)] == ["fast", "fast", "slow"]


def test_a_choice_that_a_slower_worker_cannot_keep_gives_way():
    tables = [table(10.0, "slow", size=1)]
    slower = cluster(1, model(fast=FAST.scaled(2), slow=SLOW.scaled(2)))
    host = Host(lambda: Ramsis(tables=tables, solver=None, load_rps=5.0), slower, strict=False)
    host.run(requests(0.0))
    assert dispatched(host) == [("fast", [0])]


def test_tables_for_something_else_are_refused():
    other = table(10.0, "slow", slo_s=0.5)
    policy = Ramsis(tables=other)
    with pytest.raises(
        ValueError, match=r"SLOs of 500 ms; the cluster has fast, slow under 100 ms"
    ):
        policy.cluster_changed(0.0, cluster(1))


def test_a_delay_counts_as_execution():
    solver = Solver()
    delayed = Cluster.of([model()], cluster(1).workers.values(), cluster(1).delay.__class__(0.01))
    host = Host(lambda: Ramsis(solver=solver, load_rps=5.0, margin_ms=2.0), delayed, strict=False)
    host.run(requests(0.0))
    (problem,) = solver.asked
    assert [p.latency(1) for _, _, p in problem.variants] == pytest.approx([0.03, 0.07])
    assert problem.slo_s == pytest.approx(0.098)


def test_unknown_accuracies_follow_the_order_of_preference():
    unknown = replace(
        model(), variants=tuple(replace(v, accuracy=None) for v in reversed(model().variants))
    )
    host = Host(lambda: Ramsis(solver=solve, load_rps=5.0), cluster(1, unknown), strict=False)
    host.run(requests(0.0))
    assert dispatched(host) == [("slow", [0])]


def test_headroom_asks_for_more_than_the_load():
    solver = Solver()
    host = Host(
        lambda: Ramsis(solver=solver, load_rps=10.0, headroom=1.2), cluster(2), strict=False
    )
    host.run(requests(0.0))
    assert [p.rate for p in solver.asked] == [pytest.approx(12.0)]


def test_it_works_by_name_alone():
    """Solves its own tables; a lull is used for the slow variant, a rush is not late."""
    report = simulate("ramsis", cluster(3), Workload.poisson(60.0), duration_s=20.0, warmup_s=1.0)
    assert report.bad_rate() < 0.002
    assert 71.0 < report.accuracy < 78.0
    used = report.batches.groupby("variant")["size"].mean()
    assert used["fast"] > used["slow"]


# Bursts ------------------------------------------------------------------------------------------


def bursty(shape: float, arrivals, solver=solve, workers: int = 1, seconds: float = 60.0):
    """A run of 40 requests/s a worker, and the policy."""
    made = []

    def policy() -> Ramsis:
        made.append(Ramsis(load_rps=40 * workers, arrivals=arrivals, solver=solver))
        return made[-1]

    profiles = {
        "small": LatencyProfile.linear(0.002, 0.003, 8),
        "medium": LatencyProfile.linear(0.006, 0.006, 8),
        "large": LatencyProfile.linear(0.02, 0.01, 8),
    }
    workload = Workload(arrivals=Gamma(rate=40 * workers, shape=shape))
    report = simulate(
        policy, cluster(workers, model(**profiles)), workload, duration_s=seconds, seed=1
    )
    return report, made[-1]


@pytest.mark.parametrize(
    ("shape", "found"), [(1.0, "poisson"), (0.25, "gamma 0.5"), (1 / 16, "gamma 0.25")]
)
def test_the_dispersion_of_arrivals_chooses_the_tables(shape, found):
    _, policy = bursty(shape, "measured")
    assert [table["arrivals"] for table in policy.tables_in_force()] == [found]


def test_tables_for_bursts_keep_violations_low():
    late = {arrivals: bursty(1 / 16, arrivals, optimal)[0] for arrivals in ("poisson", "measured")}
    assert late["poisson"].bad_rate() > 0.08
    assert late["measured"].bad_rate() < 0.03
    assert late["measured"].accuracy > late["poisson"].accuracy - 3


@pytest.mark.parametrize(
    ("arrivals", "found"), [("poisson", "poisson"), ({"kind": "gamma", "shape": 0.3}, "gamma 0.3")]
)
def test_arrivals_that_are_told_are_not_measured(arrivals, found):
    report, policy = bursty(1 / 16, arrivals, seconds=20)
    assert [table["arrivals"] for table in policy.tables_in_force()] == [found]
    assert report.bad_rate() < 0.5


def test_given_tables_serve_the_arrivals_that_they_are_for():
    bursts = Fixed(replace(table(50, "slow").problem, arrivals=Bursts(0.3)), ("slow", 8))
    calm = table(50, "fast")
    for arrivals, variant in (
        ("poisson", "fast"),
        ({"kind": "gamma", "shape": 0.3}, "slow"),
        ("measured", "fast"),
    ):
        host = Host(
            lambda a=arrivals: Ramsis(tables=[bursts, calm], arrivals=a, load_rps=40), cluster(1)
        )
        host.arrive(requests(0.0))
        assert dispatched(host) == [(variant, [0])]


def test_a_host_that_asks_is_told_the_table_of_every_batch():
    host = Host(lambda: Ramsis(tables=[table(100, "fast", 2)], load_rps=40), cluster(1))
    host.arrive(requests(0.0))
    host.policy.explain = True
    host.advance(0.1)
    host.arrive(requests(0.1, start=1))
    notes = [a.note for d in host.decisions for a in d.actions]
    assert notes == ["", "table for 100 requests/s on 2 workers, poisson"]


# Unlike workers ----------------------------------------------------------------------------------


def unlike(slow: int, quick: int = 1, times: float = 3.0, balancing: str = "round_robin"):
    """Workers of speed 1 and `times` as fast: makes a policy, and the cluster."""
    variants = [("small", 70.0, 0.004, 0.006), ("medium", 76.0, 0.008, 0.012)]
    variants.append(("large", 80.0, 0.015, 0.02))
    kinds = {
        name: {
            "cpu": LatencyProfile.linear(times * a, times * b, 8),
            "gpu": LatencyProfile.linear(a, b, 8),
        }
        for name, _, a, b in variants
    }
    of = Model("m", 0.15, tuple(Variant(n, kinds[n], accuracy) for n, accuracy, _, _ in variants))
    workers = [Worker(f"c{i}", "cpu", frozenset(kinds)) for i in range(slow)]
    workers += [Worker(f"g{i}", "gpu", frozenset(kinds)) for i in range(quick)]
    return Cluster.of([of], workers)


@pytest.mark.parametrize(
    ("slow", "rate", "balancing"), [(1, 140, "round_robin"), (3, 160, "shortest_queue")]
)
def test_unlike_workers_keep_what_their_tables_promise(slow, rate, balancing):
    made = []

    def policy() -> Ramsis:
        made.append(Ramsis(load_rps=rate, solver=optimal, balancing=balancing))
        return made[-1]

    report = simulate(policy, unlike(slow), Workload.poisson(rate), duration_s=60, seed=1)
    tables = {one["kind"]: one for one in made[-1].tables_in_force()}
    loads = {kind: one["rate"] / one["workers"] for kind, one in tables.items()}
    assert slow * loads["cpu"] + loads["gpu"] == pytest.approx(rate)
    assert loads["gpu"] > 3 * loads["cpu"]  # a slow one has no time left for large batches
    assert tables["gpu"]["workers"] == 1
    assert report.bad_rate() <= max(one["violation_rate"] for one in tables.values()) + 0.002
    assert report.accuracy > min(one["expected_accuracy"] for one in tables.values()) - 0.3
    (expected,) = made[-1].expected().values()
    assert report.bad_rate() <= expected.bad_rate + 0.002
    assert report.accuracy > expected.accuracy - 0.3


def test_requests_are_dealt_out_by_speed():
    host = Host(lambda: Ramsis(solver=None), unlike(1), strict=False)
    host.run([Request(i, "m", 0.1 * i, 0.1 * i + 0.15) for i in range(40)])
    # In batches that leave as much time as they take: 4 in 66 ms, and 8 in 38 ms.
    assert Counter(sent.worker for sent in host.sent) == {"g0": 31, "c0": 9}
    host.check_replay()


def test_a_worker_too_slow_for_the_slo_gets_nothing():
    host = Host(lambda: Ramsis(solver=None), unlike(2, times=40.0), strict=False)
    for i in range(6):
        host.arrive([Request(i, "m", host.now, host.now + 0.15)])
        host.advance(host.now + 0.1)
    assert [sent.worker for sent in host.sent] == 6 * ["g0"]


# Queues ------------------------------------------------------------------------------------------


def test_round_robin_deals_out_in_turn():
    host = Host(lambda: Ramsis(solver=solve, load_rps=5.0), cluster(3), strict=False)
    host.arrive(requests(*[0.0] * 7))
    assert host.timeline() == [(0.0, "w0", [0, 3, 6]), (0.0, "w1", [1, 4]), (0.0, "w2", [2, 5])]


def test_a_worker_that_hangs_is_passed_over():
    host = Host(lambda: Ramsis(solver=solve, load_rps=5.0), cluster(2), strict=False)
    host.arrive(requests(0.0))
    host.advance(0.5, ends=False)
    for i in range(4):
        host.arrive(requests(0.5 + i, start=1 + i))
        host.finish("w1", decide=False)
        host.advance(1.5 + i, ends=False)
    assert [w for _, w, _ in host.timeline()] == ["w0", "w1", "w1", "w1", "w1"]


def test_shortest_queue_prefers_the_idle_and_the_short():
    make = lambda: Ramsis(solver=solve, load_rps=5.0, balancing="shortest_queue")  # noqa: E731
    host = Host(make, cluster(2), strict=False)
    host.arrive(requests(0.0))  # w0 runs it until 0.06
    host.now = 0.01
    host.arrive(requests(0.01, start=1))  # w1 idles
    host.now = 0.02
    host.arrive(requests(0.02, start=2))  # w0 and w1 run; w0 was touched longer ago
    host.now = 0.03
    host.arrive(requests(0.03, start=3))  # w1, as w0 has one waiting
    host.advance(1.0)
    assert [(w, ids) for _, w, ids in host.timeline()] == [
        ("w0", [0]),
        ("w1", [1]),
        ("w0", [2]),
        ("w1", [3]),
    ]


def test_shortest_queue_keeps_its_heap_small():
    policy = Ramsis(solver=solve, load_rps=60.0, balancing="shortest_queue")
    simulate(policy, cluster(4), Workload.poisson(60.0), duration_s=30.0)
    (group,) = policy._groups["m"]
    assert len(group.shortest) < 100


@pytest.mark.parametrize("late", ["drop", "serve"])
def test_late_requests(late):
    make = lambda: Ramsis(solver=solve, load_rps=5.0, late=late)  # noqa: E731
    host = Host(make, cluster(1), strict=False)
    # The first takes 60 ms; of the others 2 fit into what is left then.
    host.run(requests(0.0, *[0.001] * 5))
    if late == "drop":
        assert dispatched(host) == [("slow", [0]), ("fast", [1, 2])]
        assert {reason for _, reason in host.dropped.values()} == {DropReason.WOULD_MISS}
        assert min(at for at, _ in host.dropped.values()) == pytest.approx(0.081, abs=1e-5)
    else:
        assert dispatched(host) == [("slow", [0]), ("fast", [1, 2]), ("fast", [3, 4, 5])]
        assert not host.dropped


def test_a_long_queue_is_not_shed_while_it_can_be_served():
    """ℓ(8) = 160 ms and an SLO of 1 s: 16 can wait, though tables tell only 8 apart."""
    here = cluster(1, model(slo_s=1.0))
    host = Host(lambda: Ramsis(load_rps=20.0), here, strict=False)
    host.run(requests(*[0.0] * 16, slo=1.0))
    assert not host.dropped
    assert sum(len(ids) for _, ids in dispatched(host)) == 16


def test_a_table_that_drops_sheds_the_most_urgent():
    here = cluster(1, model(slo_s=0.2))
    host = Host(lambda: Ramsis(solver=solve, load_rps=20.0), here, strict=False)
    host.arrive(requests(*[0.0] * 9, slo=0.2))
    assert sorted(host.dropped.items()) == [(i, (0.0, DropReason.SHED)) for i in (0, 1)]
    assert dispatched(host) == [("fast", [2, 3, 4, 5, 6, 7, 8])]


def test_requests_move_when_workers_come_and_go():
    host = Host(lambda: Ramsis(solver=solve, load_rps=5.0), cluster(2), strict=False)
    host.arrive(requests(0.0, 0.0, 0.0, 0.0))
    host.arrive(requests(0.0, 0.0, start=4), decide=False)
    host.change(cluster(3))
    assert host.timeline() == [(0.0, "w0", [0, 2]), (0.0, "w1", [1, 3]), (0.0, "w2", [4])]  # 5: w0
    host.change(cluster(0))
    host.advance(0.2)
    assert host.dropped == {5: (pytest.approx(0.1), DropReason.NO_WORKER)}


# Groups ------------------------------------------------------------------------------------------


def test_models_get_workers_in_proportion_to_their_work():
    models = [model("a"), model("b")]
    policy = Ramsis(solver=solve, deal_every_s=1.0)
    workload = Workload.poisson(80.0, popularity={"a": 7.0, "b": 1.0})
    report = simulate(policy, cluster(8, *models), workload, duration_s=20.0, warmup_s=3.0)
    assert len(policy._groups["a"][0].lanes) == 7
    assert report.worst_bad_rate < 0.02
    batches = report.batches[report.batches.started_s > 3.0]
    of_b = batches[batches.variant.str.startswith("b-")]
    assert of_b.worker.nunique() <= 2


def test_fewer_workers_than_models_are_shared():
    models = [model("a"), model("b"), model("c")]
    policy = Ramsis(solver=solve)
    report = simulate(policy, cluster(2, *models), Workload.poisson(9.0), duration_s=60.0)
    assert report.worst_bad_rate < 0.12
    assert sorted(len(w.lanes) for w in policy._workers.values()) == [1, 2]


def test_a_worker_serves_what_only_it_can():
    a, b = model("a"), model("b")
    both = frozenset(v.name for m in (a, b) for v in m.variants)
    only_a = frozenset(v.name for v in a.variants)
    workers = [Worker("w0", "default", both), Worker("w1", "default", only_a)]
    host = Host(lambda: Ramsis(solver=solve), Cluster.of([a, b], workers), strict=False)
    host.run([*requests(0.0, name="a"), *requests(0.0, name="b", start=1)])
    assert sorted(host.timeline()) == [(0.0, "w0", [1]), (0.0, "w1", [0])]


def test_slos_have_workers_and_tables_of_their_own():
    solver = Solver()
    make = lambda: Ramsis(solver=solver, slos_ms={"m": [300.0, 100.0]}, load_rps=5.0)  # noqa: E731
    host = Host(make, cluster(2), strict=False)
    # The nearest counts: a live host leaves 0.295 s of 0.3 s.
    host.arrive([*requests(0.0, slo=0.15), *requests(0.0, slo=0.295, start=1)])
    assert [w for _, w, _ in host.timeline()] == ["w0", "w1"]
    assert [p.slo_s for p in solver.asked] == [0.1, 0.3]
    assert all(p.num_workers == 1 for p in solver.asked)


@pytest.mark.parametrize("kept_s", [0.0, 0.005])
def test_every_class_has_tables_for_its_own_slo(kept_s):
    """`kept_s`: time that a live host keeps of every request's for the way back."""
    solver = Solver()
    tree = Tree.of_model("m", {"": 0.3, "gold": 0.1, "bulk": 2.0})
    kwargs = {"solver": solver, "load_rps": 5.0, "slos_ms": {"m": [500.0]}}
    host = Host(
        lambda: policy_for("ramsis", kwargs, (tree,)), cluster(4, model(slo_s=0.3 - kept_s))
    )
    slos = (0.1, 0.3, 0.5, 2.0)
    host.run([r for i, s in enumerate(slos) for r in requests(0.0, slo=s - kept_s, start=i)])
    assert [p.slo_s for p in solver.asked] == list(slos)
    assert {w for _, w, _ in host.timeline()} == {"w0", "w1", "w2", "w3"}


def test_fewer_workers_than_classes_are_shared():
    solver = Solver()
    tree = Tree.of_model("m", {"": 0.3, "gold": 0.1})
    kwargs = {"solver": solver, "load_rps": 5.0}
    host = Host(lambda: policy_for("ramsis", kwargs, (tree,)), cluster(1, model(slo_s=0.3)))
    host.run([*requests(0.0, slo=0.1), *requests(1.0, slo=0.3, start=1)])
    assert [p.slo_s for p in solver.asked] == [0.1, 0.3]
    assert [p.rate for p in solver.asked] == [10.0, 10.0]  # a worker has half its time for each


def test_tasks_of_a_pipeline_have_tables_for_every_class():
    solver = Solver()
    tasks = (TreeTask("a", "a"), TreeTask("b", "b", "a"))
    tree = Tree("a", tasks, {"": 0.8, "gold": 0.4})
    kwargs = {"solver": solver, "load_rps": 5.0}
    models = (model("a", slo_s=0.8), model("b", slo_s=0.8))
    host = Host(lambda: policy_for("ramsis", kwargs, (tree,)), cluster(4, *models))
    host.run([*requests(0.0, name="a", slo=0.4), *requests(1.0, name="a", slo=0.8, start=1)])
    gold, base = (p.slo_s for p in solver.asked)
    assert base == pytest.approx(2 * gold)
    assert 0.2 < gold < 0.4


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"balancing": "random"}, "balancing must be one of round_robin, shortest_queue"),
        ({"late": "never"}, "late must be one of drop, serve"),
        ({"load_step": 1.0}, "load_step"),
        ({"drift": 0.0}, "drift"),
        ({"margin_ms": -1.0}, "margin_ms"),
        ({"monitor": "median"}, "monitor must be one of mean, ewma, peak, got 'median'"),
        ({"solver": "nowhere:solve"}, "nowhere"),
        ({"headroom": 0.0}, "headroom"),
        ({"options": {"rate": 1.0}}, "options has no rate; it takes balancing, batching"),
        ({"options": {"arrivals": "poisson"}}, "give it as the policy's argument `arrivals`"),
        ({"arrivals": "normal"}, "arrivals is measured, poisson, .* got 'normal'"),
        (
            {"arrivals": {"kind": "normal"}},
            "arrivals.kind: must be one of poisson, gamma, empirical, got 'normal'",
        ),
        ({"arrivals": {"kind": "gamma"}}, "arrivals.shape: required; it must be a number above 0"),
        (
            {"arrivals": {"kind": "gamma", "shape": -1}},
            "arrivals.shape: must be above 0, got -1",
        ),
        (
            {"arrivals": {"kind": "gamma", "shape": "x"}},
            "arrivals.shape: must be a number above 0, got 'x'",
        ),
        ({"arrivals": {"kind": "empirical", "file": "none"}}, "arrivals.file: none"),
        ({"options": {"num_slacks": 0}}, "options: num_slacks"),
    ],
)
def test_mistakes_are_named(kwargs, named):
    with pytest.raises(ValueError, match=named):
        make_policy("ramsis", kwargs)
