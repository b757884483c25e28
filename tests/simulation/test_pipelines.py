"""Pipelines in virtual time, with a policy and planners that can be worked out by hand."""

import math
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.loki.terms import Problem, Task, Variant, as_auto
from ray_slo.core import Decision, Dispatch, Drop, DropReason, LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.planning import auto
from ray_slo.planning.brains.auto import AutoBrain
from ray_slo.planning.brains.auto_jobs import AutoSetting, Plans
from ray_slo.planning.result import Infeasible, best
from ray_slo.simulation import Poisson, PolicyError, Times, Trace, Workload, simulate_application
from ray_slo.simulation.application_report import ApplicationReport


class Fifo:
    """A queue per task; an idle worker takes what waits for its task, up to its batch size.
    Requests whose deadline has passed are dropped."""

    serves_late: ClassVar[bool] = True

    def __init__(self, parents=None, drops=True, **_):
        self.parents, self.drops = parents, drops
        self.queue, self.busy, self.batches, self.log = [], {}, 0, []

    def requests_arrived(self, now, requests):
        self.log.append((now, "arrived", [(r.id, r.model) for r in requests]))
        self.queue += requests

    def requests_cancelled(self, now, requests):
        self.log.append((now, "cancelled", sorted(r.id for r in requests)))
        gone = {r.id for r in requests}
        self.queue = [r for r in self.queue if r.id not in gone]

    def batch_finished(self, now, worker, outcome):
        del self.busy[worker]

    def cluster_changed(self, now, cluster):
        at = {w.id: w.assigned[0].variant if w.assigned else None for w in cluster.workers.values()}
        self.log.append((now, "cluster", at))
        self.cluster = cluster

    def decide(self, now):
        actions = []
        late = [r for r in self.queue if self.drops and r.deadline < now]
        if late:
            actions.append(Drop(late, DropReason.EXPIRED))
            self.queue = [r for r in self.queue if r not in late]
        for worker in self.cluster.workers.values():
            if worker.id in self.busy or not worker.assigned:
                continue
            variant = worker.assigned[0].variant
            task = next(
                m.name
                for m in self.cluster.models.values()
                if variant in [v.name for v in m.variants]
            )
            mine = [r for r in self.queue if r.model == task][: worker.assigned[0].batch_size]
            if mine:
                self.queue = [r for r in self.queue if r not in mine]
                end = now + self.cluster.profile(variant, worker.id)(len(mine))
                self.busy[worker.id] = self.batches
                actions.append(Dispatch(self.batches, worker.id, variant, mine, now, end))
                self.batches += 1
        return Decision(actions, math.inf)


def fixed(seconds):
    return LatencyProfile([seconds] * 4)


DETECT = Task("detect", (Variant("d", 90.0, fixed(1.0), {"name": 2.0}),))
NAME = Task(
    "name", (Variant("large", 80.0, fixed(2.0)), Variant("small", 50.0, fixed(1.0))), "detect"
)
PROBLEM = Problem((DETECT, NAME), demand=0.0, workers=4, slo_s=10.0, batch_sizes=(4,))


PROFILES = {(v.name, "worker"): v.profile for t in PROBLEM.tasks for v in t.variants}


def planned(size=4, step="hardware", **workers):
    """A plan with so many workers by variant, with batches of `size`."""
    slots = tuple(
        auto.Slot("worker", (Assigned(v, size, 1.0),), (v,))
        for v, n in workers.items()
        for _ in range(n)
    )
    served = {"detect": 1.0}
    return auto.Plan(
        {"worker": len(slots)}, slots, 0.0, served, 0.0, 0.0, auto.Prices(), step, "as told"
    )


class Script(AutoBrain):
    """Plans (or errors) one after the other; the last one stays. For fewer workers than planned, it
    is the same plan, or the one for so many in `meanwhile`."""

    def __init__(self, problem, plans, meanwhile=()):
        workers = {} if isinstance(plans[0], Exception) else best(plans[0]).workers
        # Workers that are not needed stop at once.
        scales = frozenset(["worker"])
        super().__init__(AutoSetting(problem, workers, scales, interval_s=0.0, profiles=PROFILES))
        self.plans, self.asked, self.meanwhile = list(plans), [], dict(meanwhile)

    @property
    def solve(self):
        return self.made

    def made(self, job):
        self.asked.append(job)
        plan = self.plans.pop(0) if len(self.plans) > 1 else self.plans[0]
        if isinstance(plan, Exception):
            raise plan
        there = job.present["worker"]
        return Plans(
            plan, self.meanwhile.get(there, plan) if there < len(best(plan).slots) else plan
        )


def at(*times):
    return Workload(arrivals=Times(times_s=list(times)))


def run(workload, *plans, problem=PROBLEM, policy=None, meanwhile=(), told=None, **kwargs):
    """Run the pipeline. `told`: factors that the planner is told, by task."""
    kwargs = {"items": "fixed", "check_s": 100.0, "interval_s": 100.0} | kwargs
    policy, asked = policy or Fifo(), as_auto(problem)
    if not problem.demand:
        asked = replace(asked, demand={"detect": auto.Demand(1.0)})
    first = asked
    if told:
        (tree,) = asked.trees
        tasks = (replace(t, factors=told.get(t.name, t.factors)) for t in tree.tasks)
        first = replace(asked, trees=(replace(tree, tasks=tuple(tasks)),))
    brain = Script(first, plans, meanwhile)
    report = simulate_application(
        asked, {"detect": workload}, policy=policy, planner=brain, **kwargs
    )
    report.brain = brain
    return report, policy


def batches(report):
    frame = report.batches
    columns = (frame.worker, frame.variant, frame["size"], frame.started_s, frame.finished_s)
    return list(zip(*columns, strict=True))


def clusters(policy):
    return [(now, what) for now, kind, what in policy.log if kind == "cluster"]


def test_timeline():
    report, _policy = run(at(0, 0.5), planned(d=1, large=1))
    # Frame 0 makes requests 2 and 3 at 1, frame 1 makes 4 and 5 at 2.
    assert batches(report) == [
        ("w0", "d", 1, 0, 1),
        ("w0", "d", 1, 1, 2),
        ("w1", "large", 2, 1, 3),
        ("w1", "large", 2, 3, 5),
    ]
    frames = report.requests
    assert frames.outcome.tolist() == ["ok", "ok"]
    assert frames.end_s.tolist() == [3, 5]
    assert frames.accuracy.tolist() == pytest.approx([72, 72])
    assert frames.leaves.tolist() == [2, 2]
    tasks = report.task_requests
    assert tasks.frame.tolist() == [0, 1, 0, 0, 1, 1]
    assert tasks.parent.tolist() == [-1, -1, 0, 0, 1, 1]
    assert tasks.task.tolist() == ["detect"] * 2 + ["name"] * 4
    assert tasks.started_s.tolist() == [0, 1, 1, 1, 3, 3]
    assert report.bad_rate() == 0
    assert report.accuracy() == pytest.approx(72)


def test_what_a_request_knows_of_its_parent():
    seen = []

    class Watching(Fifo):
        def requests_arrived(self, now, requests):
            super().requests_arrived(now, requests)
            seen.extend((r.model, r.arrival, r.deadline, r.upstream) for r in requests)
            assert {r.arrival for r in requests} == {now}

    problem = replace(PROBLEM, communication_s=0.25)
    run(at(0, 0.5), planned(d=1, large=1), problem=problem, policy=Watching())
    # A client's request is at its task 0.25 later; its deadline does not move.
    assert seen[:2] == [("detect", 0.25, 10, None), ("detect", 0.75, 10.5, None)]
    # The second one waited for half a second, and ran from 1.25 to 2.25.
    assert seen[4] == ("name", 2.5, 10.5, ("w0", "d", 1.5))


def test_a_frame_without_items_ends_at_the_root():
    none = replace(DETECT, variants=(Variant("d", 90.0, fixed(1.0), {"name": 0.0}),))
    report, _ = run(at(0), planned(d=1, large=1), problem=replace(PROBLEM, tasks=(none, NAME)))
    assert report.requests.end_s.tolist() == [1]
    assert report.requests.leaves.tolist() == [1]
    assert report.accuracy() == pytest.approx(90)


def test_accuracy_is_the_mean_over_leaves_and_measured_paths_count():
    # Batches of one, so that one item goes to each variant.
    made = planned(1, d=1, large=1, small=1)
    report, _ = run(at(0), made)
    assert report.accuracy() == pytest.approx((72 + 45) / 2)
    measured = replace(PROBLEM, path_accuracies={("d", "small"): 60.0})
    report, _ = run(at(0), made, problem=measured)
    assert report.accuracy() == pytest.approx((72 + 60) / 2)


def test_one_late_branch_makes_a_frame_late():
    problem = replace(PROBLEM, slo_s=2.5)
    report, _ = run(at(0), planned(d=1, large=1), problem=problem, policy=Fifo(drops=False))
    assert report.requests.outcome.tolist() == ["late"]
    assert report.bad_rate() == 1
    assert math.isnan(report.accuracy())


def test_one_dropped_branch_cancels_the_rest():
    class DropsOne(Fifo):
        def decide(self, now):
            victims = [r for r in self.queue if r.id == 2]
            self.queue = [r for r in self.queue if r.id != 2]
            if victims:
                return Decision([Drop(victims, DropReason.SHED)], math.inf)
            return super().decide(now)

    report, policy = run(at(0, 0), planned(d=1, large=1), policy=DropsOne())
    # Both frames are detected in one batch; of frame 0 (2, 3) number 2 is dropped at 1.
    assert (1, "cancelled", [3]) in policy.log
    assert batches(report) == [("w0", "d", 2, 0, 1), ("w1", "large", 2, 1, 3)]
    frames = report.requests
    assert frames.outcome.tolist() == ["dropped", "ok"]
    assert frames.dropped_at.tolist()[0] == "name"
    assert frames.drop_reason.tolist()[0] == "shed"
    assert frames.end_s.tolist() == [1, 3]
    outcomes = ["served", "served", "dropped", "cancelled", "served", "served"]
    assert report.task_requests.outcome.tolist() == outcomes


def test_requests_of_a_cancelled_frame_do_not_arrive():
    # Cars and faces, one hop away; a face is dropped while the cars are still running.
    root = Task("detect", (Variant("d", 90.0, fixed(1.0), {"a": 1.0, "b": 1.0}),))
    tasks = (
        root,
        Task("a", (Variant("a1", 80.0, fixed(2.0), {"c": 1.0}),), "detect"),
        Task("b", (Variant("b1", 80.0, fixed(1.0)),), "detect"),
        Task("c", (Variant("c1", 80.0, fixed(1.0)),), "a"),
    )
    problem = Problem(tasks, 0.0, 4, 10.0, (4,))
    plan = planned(d=1, a1=1, b1=1, c1=1)

    class NoFaces(Fifo):
        def decide(self, now):
            faces = [r for r in self.queue if r.model == "b"]
            self.queue = [r for r in self.queue if r.model != "b"]
            if now >= 2 and faces:
                return Decision([Drop(faces, DropReason.NO_WORKER)], math.inf)
            actions = super().decide(now).actions
            self.queue += faces
            return Decision(actions, 2.0 if now < 2 else math.inf)

    report, policy = run(at(0), plan, problem=problem, policy=NoFaces())
    assert (2, "cancelled", [1]) in policy.log  # it runs on until 3, in vain
    assert [b[1] for b in batches(report)] == ["d", "a1"]
    assert report.requests.outcome.tolist() == ["dropped"]


def test_a_policy_that_runs_what_was_cancelled_is_told():
    class Deaf(Fifo):
        def requests_cancelled(self, now, requests): ...

        def decide(self, now):
            victims = [r for r in self.queue if r.id == 1]
            self.queue = [r for r in self.queue if r.id != 1]
            if victims:
                return Decision([Drop(victims, DropReason.SHED)], math.inf)
            return super().decide(now)

    with pytest.raises(PolicyError, match="request 2, which was cancelled"):
        run(at(0), planned(d=1, large=1), policy=Deaf())


# -- the planner in the loop -------------------------------------------------------------------


def test_planner_is_asked_every_interval_and_applied_later():
    report, policy = run(
        at(0, 3, 9), planned(d=1, large=1), planned(d=1, small=1), interval_s=4.0, solve_s=1.0
    )
    plans = report.plans
    # At 12, all is answered, so this plan is the last.
    assert plans.asked_s.tolist() == [0, 4, 8, 12]
    assert plans.applied_s.tolist() == [0, 5, 9, 13]
    assert plans.why.tolist() == ["first plan"] + ["period"] * 3
    assert plans.variants.tolist()[:2] == [{"d": 1, "large": 1}, {"d": 1, "small": 1}]
    # As many workers: none is started for it.
    assert clusters(policy) == [
        (0, {"w0": "d", "w1": "large"}),
        (5, {"w0": "d", "w1": "small"}),
    ]
    assert report.workers == [(0, 2)]


def test_start_up_and_loading_take_time():
    report, policy = run(
        at(0, 30),
        planned(d=1, large=1),
        planned(d=1, large=2),
        planned(d=1, large=1),
        interval_s=10.0,
        start_s=3.0,
        load_s=2.0,
    )
    assert clusters(policy) == [
        (0, {"w0": "d", "w1": "large"}),
        (15, {"w0": "d", "w1": "large", "w2": "large"}),
        (20, {"w0": "d", "w1": "large", "w2": None}),
        (22, {"w0": "d", "w1": "large"}),  # it has loaded "d" first: Serve may stop any worker
    ]
    # It is on from when it is asked for.
    assert report.workers == [(0, 2), (10, 3), (22, 2)]
    assert report.workers_used(0, 40) == pytest.approx(2.3)


def test_while_workers_start_the_others_run_a_plan_of_their_own():
    report, policy = run(
        at(0, 20.0),
        planned(d=1, large=1),
        planned(d=1, large=2),
        meanwhile={2: planned(d=1, small=1)},
        interval_s=10.0,
        check_s=1.0,
        start_s=3.0,
        load_s=1.0,
        solve_s=0.5,
    )
    both = report.plans[report.plans.applied_s >= 10].iloc[:2]
    assert both.why.tolist() == ["period", "worker joined"]
    assert both.workers.tolist() == [3, 3]
    assert both.variants.tolist() == [{"d": 1, "small": 1}, {"d": 1, "large": 2}]
    assert "With the 2 that are there" in both.explanation.iloc[0]
    assert clusters(policy) == [
        (0, {"w0": "d", "w1": "large"}),
        (11.5, {"w0": "d", "w1": "small"}),
        (14.5, {"w0": "d", "w1": "small", "w2": "large"}),  # it does what it was started for
        (16.5, {"w0": "d", "w1": "large", "w2": "large"}),
    ]


@pytest.mark.parametrize(
    ("make_before_break", "expected"),
    [
        (True, [(0, "large"), (12, "small")]),
        (False, [(0, "large"), (10, None), (13, "small")]),  # its batch runs until 11
    ],
)
def test_swaps(make_before_break, expected):
    problem = replace(PROBLEM, workers=2)
    report, policy = run(
        at(0, 8, 14),
        planned(d=1, large=1),
        planned(d=1, small=1),
        problem=problem,
        interval_s=10.0,
        load_s=2.0,
        make_before_break=make_before_break,
    )
    assert [(now, what["w1"]) for now, what in clusters(policy)] == expected
    assert report.requests.outcome.tolist() == ["ok"] * 3
    assert report.requests.end_s.tolist()[1] == 11  # what runs is not interrupted


def test_loading_is_given_up_when_the_plan_turns_round():
    problem = replace(PROBLEM, workers=2)
    _, policy = run(
        at(0, 30),
        planned(d=1, large=1),
        planned(d=1, small=1),
        planned(d=1, large=1),
        problem=problem,
        interval_s=10.0,
        load_s=15.0,
    )
    assert {what["w1"] for _, what in clusters(policy)} == {"large"}


def test_a_worker_on_its_way_out_is_called_back():
    _, policy = run(
        at(0, 9, 30),
        planned(d=1, large=2),
        planned(d=1, large=1),
        planned(d=1, large=2),
        interval_s=10.0,
        load_s=5.0,
    )
    # At 10 it has nothing to do, and is off when it has a spare; from 20 on it is loaded anew.
    assert clusters(policy)[1:] == [
        (10, {"w0": "d", "w1": "large", "w2": None}),
        (15, {"w0": "d", "w1": "large"}),
        (25, {"w0": "d", "w1": "large", "w2": "large"}),
    ]
    both, fewer = planned(1, d=1, large=2), planned(1, d=1, large=1)
    _, policy = run(at(0, 8.5, 30), *[both] * 10, fewer, both, interval_s=1.0, load_s=5.0)
    # At 10 it runs until 11.5: when it is wanted again at 11, it goes on at once.
    assert clusters(policy)[1:] == [
        (10, {"w0": "d", "w1": "large", "w2": None}),
        (11, {"w0": "d", "w1": "large", "w2": "large"}),
    ]


def test_a_planner_that_fails_changes_nothing():
    report, policy = run(
        at(0, 30), planned(d=1, large=1), RuntimeError("licence"), planned(d=1, small=1),
        interval_s=10.0,
    )  # fmt: skip
    plans = report.plans
    assert plans.error.tolist()[:3] == ["", "planning failed: RuntimeError: licence", ""]
    assert plans.applied_s.tolist()[:3] == pytest.approx([0, math.nan, 20], nan_ok=True)
    assert [now for now, _ in clusters(policy)] == [0, 20]
    with pytest.raises(RuntimeError, match="licence"):
        run(at(0), RuntimeError("licence"))


def test_infeasible_is_served_as_well_as_it_goes():
    report, _ = run(at(0), Infeasible("too much", planned(d=1, large=1)))
    assert report.plans.shortfall.tolist() == ["too much"]
    assert report.bad_rate() == 0


def test_demand_is_measured_and_a_jump_is_noticed():
    rates = Trace(rates=[20.0, 20.0, 100.0], interval_s=10.0)
    report, _ = run(
        Workload(arrivals=rates),
        planned(d=1, large=1),
        problem=replace(PROBLEM, slo_s=100.0, demand=20.0),
        policy=Fifo(drops=False),
        interval_s=50.0,
        check_s=1.0,
        seed=3,
    )
    plans = report.plans
    jumps = plans[(plans.why == "demand changed") & (plans.asked_s <= 22)]
    assert jumps.asked_s.iloc[0] == 21
    assert jumps.demand.iloc[-1] > 80


def test_factors_are_learned_and_loads_are_told():
    report, _ = run(
        Workload(arrivals=Poisson(rate=2.0)),
        planned(d=2, large=2),
        problem=replace(PROBLEM, slo_s=1000.0),
        policy=Fifo(drops=False),
        duration_s=200.0,
        interval_s=10.0,
        told={"detect": {"d": {"name": 5.0}}},
    )
    jobs = report.brain.asked
    assert jobs[0].whole.trees[0]["detect"].factors == {"d": {"name": 5.0}}
    last = jobs[20].whole
    learned = last.trees[0]["detect"].factors["d"]["name"]
    assert learned == pytest.approx((20 * 5 + 400 * 2) / 420, rel=0.1)
    assert sorted(sorted(of.variants)[0] for of in last.current) == ["d", "d", "large", "large"]


# -- distributions, seeds, arguments -----------------------------------------------------------


def test_items_per_request():
    root = replace(DETECT, variants=(Variant("d", 90.0, fixed(0.001), {"name": 2.5}),))
    problem = replace(PROBLEM, tasks=(root, NAME), slo_s=1000.0)
    report, _ = run(
        Workload(arrivals=Poisson(rate=50.0)),
        planned(d=1, small=1),
        problem=problem,
        policy=Fifo(drops=False),
        duration_s=20.0,
        items="poisson",
    )
    tasks = report.task_requests
    made = tasks[tasks.parent >= 0].groupby("parent").size()
    n = report.count()
    mean = made.sum() / n
    assert mean == pytest.approx(2.5, rel=0.1)
    assert (made**2).sum() / n - mean**2 == pytest.approx(2.5, rel=0.25)


def test_fixed_items_have_the_factor_as_their_mean():
    root = replace(DETECT, variants=(Variant("d", 90.0, fixed(1.0), {"name": 2.5}),))
    report, _ = run(
        at(0, 2, 4, 6), planned(d=1, large=2), problem=replace(PROBLEM, tasks=(root, NAME))
    )
    assert report.requests.leaves.tolist() == [2, 3, 2, 3]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"interval_s": 0.0}, "interval_s must be positive, got 0.0"),
        ({"load_s": -1.0}, "load_s must be at least 0, got -1.0"),
        ({"truth": as_auto(PROBLEM).models[:1]}, "truth must have the models detect, name"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        run(at(0), planned(d=1, large=1), **kwargs)


def test_arrivals_need_an_end():
    with pytest.raises(ValueError, match="duration_s is needed"):
        run(Workload(arrivals=Poisson(rate=1.0)), planned(d=1, large=1))


# -- conservation ------------------------------------------------------------------------------

variant_names = st.sampled_from(["d", "large", "small"])
plans = st.lists(
    st.dictionaries(variant_names, st.integers(1, 2), max_size=2).map(lambda p: {"d": 1, **p}),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    plans=plans,
    times=st.lists(st.floats(0, 30), min_size=1, max_size=12),
    slo_s=st.sampled_from([3.0, 6.0, 20.0]),
    load_s=st.sampled_from([0.0, 1.5, 7.0]),
    start_s=st.sampled_from([0.0, 2.0]),
    solve_s=st.sampled_from([0.0, 0.5]),
    make_before_break=st.booleans(),
    communication_s=st.sampled_from([0.0, 0.1]),
    items=st.sampled_from(["fixed", "poisson"]),
    drops=st.booleans(),
)
def test_no_request_is_lost(
    plans, times, slo_s, communication_s, drops, **kwargs
):  # fmt: skip
    problem = replace(PROBLEM, slo_s=slo_s, communication_s=communication_s)
    report, _policy = run(
        at(*times),
        *(planned(**p) for p in plans),
        problem=problem,
        policy=Fifo(drops=drops),
        interval_s=3.0,
        check_s=1.0,
        duration_s=40.0,
        **kwargs,
    )
    frames, tasks = report.requests, report.task_requests
    assert len(frames) == len(times)
    by_frame = tasks.groupby("frame")
    assert len(by_frame) == len(times)
    for i, of_frame in by_frame:
        outcomes, frame = set(of_frame.outcome), frames.iloc[i]
        assert ("dropped" in outcomes) == (frame.outcome == "dropped")
        if frame.outcome in ("ok", "late"):
            assert outcomes == {"served"}
            assert frame.end_s == of_frame.finished_s.max()
            assert (frame.outcome == "ok") == (frame.end_s <= frame.deadline_s + 1e-6)
        elif frame.outcome == "pending":  # no worker of its task was ever up again
            assert "pending" in outcomes
    served = tasks[tasks.outcome == "served"]
    made = tasks[tasks.parent >= 0]
    assert set(made.parent) <= set(served.index)
    after = tasks.finished_s.reindex(made.parent).to_numpy() + communication_s
    assert made.arrival_s.to_numpy() == pytest.approx(after)
    assert report.batches["size"].sum() == len(served)
    # A worker runs one batch at a time, and only what it has.
    for _, of_worker in report.batches.groupby("worker", observed=True):
        assert (of_worker.started_s.iloc[1:].to_numpy() >= of_worker.finished_s.iloc[:-1]).all()
    assert max(n for _, n in report.workers) <= problem.workers


def test_figures_of_a_report():
    """Frames: ok, late, dropped, pending, and ok without any request below the root."""
    nan = math.nan
    report = ApplicationReport(
        {"duration_s": 20.0, "seed": 1, "policy": "p", "planner": "q", "prices": {}},
        {
            "arrival_s": np.array([0.0, 2.0, 4.0, 12.0, 14.0]),
            "deadline_s": np.array([5.0, 7.0, 9.0, 17.0, 19.0]),
            "end_s": np.array([5.0, 7.5, 6.0, nan, 15.0]),
            "dropped": np.array([False, False, True, False, False]),
        },
        {},
        {"started_s": np.array([1.0, 8.0]), "finished_s": np.array([5.0, 14.0])},
        {"frame": np.array([0, 0, 1, 4]), "accuracy": np.array([80.0, 50.0, 80.0, 90.0])},
        [],
        {"cpu": [(0.0, 1), (10.0, 3)], "gpu": [(0.0, 2), (4.0, 0)]},
    )
    assert report.workers == [(0, 1), (0, 3), (4, 1), (10, 3)]
    assert report.workers_used() == pytest.approx((3 * 4 + 1 * 6 + 3 * 10) / 20)
    assert report.workers_used(2, 12) == pytest.approx((3 * 2 + 1 * 6 + 3 * 2) / 10)
    assert (report.busy(), report.busy(4, 12)) == pytest.approx((10 / 20, 5 / 8))
    assert [report.count(o) for o in ("ok", "late", "dropped", "pending")] == [2, 1, 1, 1]
    assert (report.count("ok", 0, 14), report.count("ok", 14)) == (1, 1)
    assert report.bad_rate() == pytest.approx(3 / 5)
    assert math.isnan(report.bad_rate(5, 12))
    assert report.accuracy() == pytest.approx((65 + 90) / 2)
    assert math.isnan(report.accuracy(4, 14))
    expected = {
        **{"policy": "p", "planner": "q", "seed": 1, "duration_s": 20.0, "requests": 5},
        **{"ok": 2, "late": 1, "dropped": 1, "pending": 1, "violation_ratio": pytest.approx(0.6)},
        **{"accuracy": 77.5, "workers": pytest.approx(2.4), "plans": 0},
    }
    assert report.summary() == report.summary() | expected
