"""Applications of any shape in virtual time."""

import math
from dataclasses import replace
from typing import ClassVar

import pytest
from scipy.stats import binom

from ray_slo.core import Decision, Dispatch, LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.core.policy import Abilities
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.planning.brains.brain import Brain, Verdict, Wanted
from ray_slo.record import decode as decision_log
from ray_slo.record import plans
from ray_slo.simulation import (
    ApplicationReport,
    Gamma,
    LogNormal,
    Poisson,
    Times,
    Trace,
    Workload,
    simulate_application,
    workloads,
)
from ray_slo.simulation.replay.compare import replay
from ray_slo.simulation.replay.tapes import tape
from tests.policies.tables import solve


class Fifo(Abilities):
    """Idle workers take what came first of what they have loaded, one request a batch, and by the
    first of the variants. Nothing is dropped."""

    serves_late: ClassVar[bool] = True

    def __init__(self):
        self.queue, self.busy, self.batches, self.log = [], set(), 0, []

    def requests_arrived(self, now, requests):
        self.log += [(r.task, r.model, r.size) for r in requests]
        self.queue += requests

    def requests_cancelled(self, now, requests):
        self.queue = [r for r in self.queue if r not in requests]

    def batch_finished(self, now, worker, outcome):
        self.busy.discard(worker)

    def cluster_changed(self, now, cluster):
        self.cluster = cluster

    def decide(self, now):
        actions = []
        for r in list(self.queue):
            model = self.cluster.models[r.model]
            for worker in self.cluster.workers.values():
                pairs = list(model.runnable(worker.hardware, worker.loaded))
                if worker.id not in self.busy and pairs:
                    variant, profile = pairs[0]
                    end = now + profile(r.size)
                    actions.append(Dispatch(self.batches, worker.id, variant.name, [r], now, end))
                    self.batches += 1
                    self.busy.add(worker.id)
                    self.queue.remove(r)
                    break
        return Decision(actions, math.inf)


class Script(Brain):
    """Targets by kind and assignments by worker at the times of plans."""

    def __init__(self, *plans):
        self.plans, self.heard, self.at = list(plans), [], 0

    @property
    def solve(self):
        return lambda problem: problem

    def configure(self, setting):
        pass

    def counted(self, now, over_s, counts):
        self.heard.append((now, counts))

    def problem(self, now, seen):
        return self.plans.pop(0) if self.plans else self.plan

    def adopt(self, problem, answer):
        self.plan = answer
        return Verdict("as told")

    def wanted(self, now, seen, hopeless):
        _targets, assigned = self.plan
        return {
            w: Wanted(
                tuple(Assigned(v, 1) for v in assigned.get(w, ())), tuple(assigned.get(w, ()))
            )
            for w in seen.workers
        }

    def target(self, kind):
        return self.plan[0][kind]

    def inputs(self, now, seen):
        return {"demand": 1.0}

    def outcome(self):
        return {"accuracy": 90.0, "bad_rate": 0.01}


def fixed(seconds, largest=4):
    return LatencyProfile([seconds] * largest)


def model(name, seconds, accuracy=90.0, kinds=("gpu",), **kwargs):
    profiles = {kind: fixed(seconds * (i + 1)) for i, kind in enumerate(kinds)}
    return auto.Model(name, (auto.Variant(f"{name}-v", accuracy, profiles, **kwargs),))


FACES = Tree(
    "photo",
    (
        TreeTask("detect", "detect", None, {"detect-v": {"who": 2.0}}),
        TreeTask("who", "name", "detect"),
    ),
    {"": 5.0},
)
NAMES = Tree("name", (TreeTask("name", "name"),), {"": 2.0, "gold": 0.5})
PROBLEM = auto.Problem(
    (model("detect", 0.5), model("name", 0.2, 80.0)),
    (FACES, NAMES),
    {},
    (auto.Kind("gpu", 0, 2, price_per_hour=3.0),),
)


def at(*times, **kwargs):
    return Workload(arrivals=Times(times_s=list(times)), **kwargs)


def test_trees_share_a_model_and_a_pool():
    policy = Fifo()
    report = simulate_application(
        PROBLEM,
        {"photo": at(0.0), "name": at(0.1), "name@gold": at(0.1)},
        policy=policy,
        planner=None,
        duration_s=5.0,
        items="fixed",
    )
    # w0 detects till 0.5; w1 names both clients' requests till 0.3 and 0.5. Then two names more.
    assert policy.log == [
        ("detect", "detect", 1),
        ("name", "name", 1),
        ("name", "name", 1),
        ("who", "name", 1),
        ("who", "name", 1),
    ]
    streams = report.streams().set_index("stream")
    assert streams.requests.to_dict() == {"photo": 1, "name": 1, "name@gold": 1}
    assert streams.p50_s.tolist() == pytest.approx([0.7, 0.2, 0.4])
    assert streams.value.tolist() == pytest.approx([0.72, 0.8, 0.8])
    assert report.value() == pytest.approx((0.72 + 0.8 + 0.8) / 3)
    assert report.worker_hours() == pytest.approx(2 * 5 / 3600)
    assert report.cost() == pytest.approx(3.0 * 2 * 5 / 3600)
    assert isinstance(report, ApplicationReport)


def test_the_deadline_is_that_of_the_class():
    report = simulate_application(
        PROBLEM,
        {"name": at(0.0, 0.0, 0.0, 0.0), "name@gold": at(0.0, 0.0, 0.0, 0.0)},
        policy=Fifo(),
        planner=None,
        duration_s=2.0,
    )
    # Two at a time: the four of the class come last, at 0.6 and 0.8.
    streams = report.streams().set_index("stream")
    assert streams.bad_rate.to_dict() == {
        "photo": pytest.approx(math.nan, nan_ok=True),
        "name": 0,
        "name@gold": 1,
    }
    assert report.bad_rate() == 0.5
    assert report.value(stream="name@gold") == 0


def test_ramsis_has_tables_for_every_class():
    asked = []

    def solver(problem):
        asked.append(problem.slo_s)
        return solve(problem)

    simulate_application(
        replace(PROBLEM, models=PROBLEM.models[1:], trees=(NAMES,)),
        {"name": at(0.0, 1.0), "name@gold": at(0.5, 1.5)},
        policy="ramsis",
        policy_kwargs={"solver": solver, "load_rps": 5.0},
        planner=None,
        duration_s=2.0,
    )
    assert sorted(set(asked)) == [0.5, 2.0]


def test_sizes_take_time_and_are_heard():
    sizes = LogNormal(median=2, sigma=0.5, max_size=3)
    profile = LatencyProfile([0.1, 0.2, 0.3])
    variant = auto.Variant("name-v", 80.0, {"gpu": profile})
    problem = replace(
        PROBLEM, models=(PROBLEM.models[0], auto.Model("name", (variant,), items=2.0))
    )
    brain = Script(({"gpu": 2}, {"w0": ["name-v"], "w1": ["name-v"]}))
    report = simulate_application(
        problem,
        {"name": Workload(arrivals=Poisson(rate=3.0), sizes=sizes)},
        policy=Fifo(),
        planner=brain,
        duration_s=10.0,
    )
    batches = report.batches
    took = (batches.finished_s - batches.started_s).round(6)
    assert set(took) == {0.1, 0.2, 0.3}
    heard = [counts.sizes["name"] for _, counts in brain.heard]
    assert (
        sum(n for sizes in heard for n in sizes.values())
        == report.count() - int((report.requests.arrival_s > 9.0).sum())
        or sum(sum(s.values()) for s in heard) == report.count()
    )


def test_kinds_scale_up_and_down_as_the_brain_says():
    kinds = (auto.Kind("gpu", 0, 2, price_per_hour=4.0), auto.Kind("cpu", 0, 3, price_per_hour=1.0))
    problem = replace(
        PROBLEM,
        models=(model("detect", 0.5), model("name", 0.2, 80.0, ("gpu", "cpu"))),
        kinds=kinds,
    )
    brain = Script(
        ({"gpu": 1, "cpu": 0}, {"gpu-0": ["name-v"]}),
        (
            {"gpu": 1, "cpu": 2},
            {"gpu-0": ["name-v", "detect-v"], "cpu-0": ["name-v"], "cpu-1": ["name-v"]},
        ),
        ({"gpu": 0, "cpu": 1}, {"cpu-0": ["name-v"]}),
    )
    report = simulate_application(
        problem,
        {"name": at(*(0.5 * i for i in range(60)))},
        policy=Fifo(),
        planner=brain,
        duration_s=30.0,
        start_s=1.0,
        load_s=1.0,
    )
    assert report.worker_hours(kind="gpu") * 3600 == pytest.approx(20, abs=0.5)
    assert report.worker_hours(kind="cpu") * 3600 == pytest.approx(2 * 10 + 1 * 10, abs=0.5)
    assert report.cost() == pytest.approx((4 * 20 + 30) / 3600, rel=0.05)
    assert report.bad_rate() == 0
    first = report.batches.groupby("worker", observed=True).started_s.min()
    assert first["cpu-0"] >= 12.0  # it starts and loads for 2 s
    table = report.expected
    assert table.expected_accuracy.tolist() == [90.0] * 3
    assert table.accuracy.tolist() == pytest.approx([80.0] * 3)


def test_a_worker_that_is_to_stop_finishes_its_batch_first():
    report = simulate_application(
        replace(PROBLEM, models=(model("detect", 0.5), model("name", 3.0, 80.0))),
        {"name": at(9.0)},
        policy=Fifo(),
        planner=Script(({"gpu": 1}, {"w0": ["name-v"]}), ({"gpu": 0}, {})),
        duration_s=30.0,
    )
    (batch,) = report.batches.itertuples()
    assert (batch.started_s, batch.finished_s) == (9.0, 12.0)
    assert report.worker_hours(kind="gpu") * 3600 == pytest.approx(12.0)


def test_the_brain_hears_of_what_was_bad():
    brain = Script(({"gpu": 1}, {"w0": ["name-v"]}))
    simulate_application(
        PROBLEM,
        {"name@gold": at(0.0, 0.0, 0.0, 0.0, 3.0)},
        policy=Fifo(),
        planner=brain,
        duration_s=5.0,
        check_s=1.0,
    )
    # The third and the fourth end at 0.6 and 0.8 s, after 0.5 s.
    assert brain.heard[0][1].bad == {"photo": 0, "name": 0, "name@gold": 2}
    assert brain.heard[0][1].requests == {"photo": 0, "name": 0, "name@gold": 4}


@pytest.mark.parametrize("slo_s", [2.0, 36_000.0])
def test_the_planner_stops_when_all_is_answered(slo_s):
    """Not at the last deadline, which may be hours later."""
    brain = Script(({"gpu": 1}, {"w0": ["name-v"]}))
    report = simulate_application(
        replace(PROBLEM, trees=(FACES, replace(NAMES, slos_s={"": slo_s}))),
        {"name": at(0.0, 4.9)},
        policy=Fifo(),
        planner=brain,
        duration_s=7.0,
        check_s=1.0,
    )
    assert report.bad_rate() == 0
    # After the last answer, workers cost money until `duration_s`.
    last_s = min(4.9 + slo_s, 7.0)
    assert [now for now, _ in brain.heard] == [*range(1, math.floor(last_s) + 1)]


def test_the_planner_goes_on_while_a_request_waits():
    brain = Script(({"gpu": 0}, {}), ({"gpu": 1}, {"w0": ["name-v"]}))
    report = simulate_application(
        replace(PROBLEM, trees=(FACES, replace(NAMES, slos_s={"": 36_000.0}))),
        {"name": at(1.0)},
        policy=Fifo(),
        planner=brain,
        duration_s=5.0,
        interval_s=10.0,
    )
    assert report.requests.end_s.tolist() == pytest.approx([10.2])
    assert [now for now, _ in brain.heard] == [*range(1, 12)]


def test_without_a_planner_all_variants_must_fit():
    small = replace(PROBLEM.kinds[0], memory_mb=900.0)
    models = tuple(model(m.name, 0.2, memory_mb={"gpu": 500.0}) for m in PROBLEM.models)
    problem = replace(PROBLEM, kinds=(small,), models=models)
    with pytest.raises(ValueError, match="'gpu' has 900 MB for 1000 MB"):
        simulate_application(problem, {"name": at(0.0)}, policy=Fifo(), planner=None)
    # A variant without a figure needs no memory.
    half = replace(problem, models=(models[0], model("name", 0.2)))
    half = replace(half, kinds=(replace(small, memory_mb=500.0),))
    assert simulate_application(half, {"name": at(0.0)}, policy=Fifo(), planner=None).count() == 1


@pytest.mark.parametrize(
    ("workloads", "kwargs", "message"),
    [
        ({"who": at(0.0)}, {}, "workloads.who: no such stream; they are photo, name, name@gold"),
        ({}, {}, "workloads must name at least one stream"),
        ({"name": at(0.0)}, {"planner": "loki"}, "planner must be 'auto', a brain, or None"),
        ({"name": at(0.0)}, {"interval_s": 0.0}, "interval_s must be positive, got 0.0"),
        ({"name": at(1.0)}, {"truth": PROBLEM.models[:1]}, "truth must have the models"),
    ],
)
def test_bad_arguments(workloads, kwargs, message):
    with pytest.raises(ValueError, match=message):
        simulate_application(PROBLEM, workloads, **{"planner": None, "policy": Fifo()} | kwargs)


def linear(alpha_ms, beta_ms, largest=16):
    return LatencyProfile([(alpha_ms * b + beta_ms) / 1e3 for b in range(1, largest + 1)])


def scaled(name, *accuracies, kinds=("gpu",), largest=16):
    """A model whose variants take 1, 1/2, … of the time of the first."""
    variants = [
        auto.Variant(
            f"{name}-{i}",
            accuracy,
            dict.fromkeys(kinds, linear(10 / (i + 1), 30 / (i + 1), largest)),
        )
        for i, accuracy in enumerate(accuracies)
    ]
    return auto.Model(name, tuple(variants))


@pytest.mark.slow
def test_auto_sizes_and_serves_several_trees():
    models = scaled("see", 90.0, 80.0), scaled("hear", 85.0, 75.0)
    trees = Tree.of_model("see", {"": 0.3}), Tree.of_model("hear", {"": 0.3, "gold": 0.15})
    problem = auto.Problem(models, trees, {}, (auto.Kind("gpu", 1, 8),))
    day = Trace(rates=[40, 160, 40], interval_s=20.0)
    report = simulate_application(
        problem,
        {"see": Workload(arrivals=day), "hear@gold": Workload(arrivals=Poisson(rate=40.0))},
        policy="deferred",
        duration_s=60.0,
        start_s=1.0,
        load_s=0.5,
        solve_s=0.1,
        interval_s=5.0,
        latency_noise=0.02,
        seed=1,
    )
    workers = report.workers
    assert report.bad_rate() < 0.03
    assert report.accuracy() > 84
    # It follows the load up, and down again.
    assert report.workers_used(30, 40) > report.workers_used(5, 18) + 1
    assert report.workers_used(50, 60) < report.workers_used(30, 40) - 1
    assert max(n for _, n in workers) <= 8
    table = report.expected
    assert (table.expected_accuracy - table.accuracy).abs().mean() < 5


def test_every_group_has_a_scheduler_of_its_own():
    kinds = (auto.Kind("a", 2, 2, group="left"), auto.Kind("b", 1, 1, group="right"))
    models = scaled("see", 90.0, kinds=("a", "b")), scaled("hear", 85.0, kinds=("a", "b"))
    trees = Tree.of_model("see", {"": 0.3}), Tree.of_model("hear", {"": 0.3})
    group_of = {"see": "left", "hear": "right"}
    problem = auto.Problem(models, trees, {}, kinds, group_of=group_of)
    load = {"see": Workload.poisson(30.0), "hear": Workload.poisson(300.0)}
    for planner in ("auto", None):
        report = simulate_application(
            problem, load, policy="deferred", duration_s=10.0, planner=planner
        )
        ran = report.batches.groupby(["worker", "variant"], observed=True).size()
        assert {worker[0] for worker, variant in ran.index if variant == "see-0"} == {"a"}
        assert {worker[0] for worker, variant in ran.index if variant == "hear-0"} == {"b"}
        # The burst of one leaves the other alone.
        assert report.bad_rate(stream="see") < 0.01 < 0.5 < report.bad_rate(stream="hear")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["deferred"])
def test_workers_are_there_for_large_requests_and_not_for_the_mean(policy, monkeypatch):
    profiles = {"cheap": linear(4, 6, 100), "fast": linear(0.8, 3, 100)}
    models = (auto.Model("rank", (auto.Variant("rank", 90.0, profiles),)),)
    kinds = (auto.Kind("cheap", 1, 12, 0.1), auto.Kind("fast", 0, 6, 2.0))
    problem = auto.Problem(models, (Tree.of_model("rank", {"": 0.2}),), {}, kinds)
    sizes = workloads.Measured(values=[2] * 19 + [80])  # 80 are in time on the fast ones alone
    load = {"rank": Workload(arrivals=Poisson(rate=60.0), sizes=sizes)}

    def run():
        report = simulate_application(
            problem, load, policy=policy, duration_s=45.0, interval_s=5.0, start_s=1.0, seed=11
        )
        return report.bad_rate(20), report.worker_hours(20, kind="fast")

    assert run() == (pytest.approx(0.0, abs=0.002), pytest.approx(25 / 3600, rel=0.2))
    monkeypatch.setattr("ray_slo.planning.brains.known.classes_of", lambda *_: ())
    bad, fast = run()
    assert bad > 0.04 and fast == 0  # what the mean size asks for


@pytest.mark.slow
def test_spares_for_interruptions_pay():
    """As many spot workers as happen to be there, each by itself, serve what the plan says."""
    profile = fixed(0.01, 1)
    models = (auto.Model("m", (auto.Variant("m", 90.0, {"spot": profile}),)),)
    trees = (Tree.of_model("m", {"": 0.1}),)
    demand, load = {"m": auto.Demand(350.0)}, {"m": Workload.poisson(350.0)}

    def bad(interruptions):
        kind = auto.Kind("spot", 0, 20, 0.2, interruptions_per_hour=interruptions)
        problem = auto.Problem(models, trees, demand, (kind,))
        workers = auto.plan(problem).workers["spot"]
        risky = replace(kind, interruptions_per_hour=4.0)
        expected = 0.0
        for there, chance in enumerate(binom.pmf(range(workers + 1), workers, risky.there)):
            if chance > 1e-4:
                report = simulate_application(
                    replace(problem, present={"spot": there}),
                    load,
                    policy="deferred",
                    planner=None,
                    duration_s=5.0,
                    seed=11,
                )
                expected += chance * report.bad_rate(2)
        return workers, expected

    (few, lost), (more, kept) = bad(0.0), bad(4.0)
    assert few < more <= few + 4
    assert kept < 0.01 < 0.05 < lost


def _groups_of(batches):
    """First letters of the workers that ran each variant."""
    found = {}
    for variant, worker in zip(batches.variant, batches.worker, strict=True):
        found.setdefault(variant, set()).add(worker[0])
    return found


@pytest.mark.slow
def test_models_move_to_the_group_that_has_time_and_nothing_is_lost():
    kinds = (auto.Kind("a", 1, 3, group="left"), auto.Kind("b", 1, 3, group="right"))
    models = tuple(scaled(name, 90.0, kinds=("a", "b")) for name in ("see", "hear", "feel"))
    trees = tuple(Tree.of_model(model.name, {"": 0.3}) for model in models)

    def rates(*values):
        return Workload(arrivals=Trace(rates=values, interval_s=25.0))

    load = {"see": rates(150, 20), "hear": rates(20, 150), "feel": rates(110, 110)}
    fixed = [{"see": "left", "hear": "right", "feel": group} for group in ("left", "right")]
    bad = {}
    for group_of in ({}, *fixed):
        problem = auto.Problem(models, trees, {}, kinds, group_of=group_of)
        report = simulate_application(
            problem,
            load,
            policy="deferred",
            duration_s=50.0,
            interval_s=5.0,
            load_s=1.0,
            start_s=2.0,
            seed=11,
        )
        bad[group_of.get("feel", "chosen")] = report.bad_rate()
        assert not (report.requests.outcome == "pending").any()
        if not group_of:
            ran = report.batches
            early = _groups_of(ran[ran.started_s < 20])
            late = _groups_of(ran[(ran.started_s > 40) & (ran.started_s < 50)])
            # The two that are busy are apart, and the third is beside the quiet one.
            assert [len(found) for found in (*early.values(), *late.values())] == [1] * 6
            assert early["feel-0"] == early["hear-0"] != early["see-0"]
            assert late["feel-0"] == late["see-0"] != late["hear-0"]
    assert bad["chosen"] < 0.5 * min(bad["left"], bad["right"]), bad


def test_preempted_requests_of_dropped_frames_do_not_come_back():
    models = scaled("detect", 90.0, largest=4), scaled("name", 80.0, largest=4)
    made = {"detect-0": {"who": 2.0}}
    tasks = (TreeTask("detect", "detect", None, made), TreeTask("who", "name", "detect"))
    trees = Tree("photo", tasks, {"": 0.4}), Tree.of_model("name", {"": 0.2})
    problem = auto.Problem(models, trees, {}, (auto.Kind("gpu", 2, 2),))
    report = simulate_application(
        problem,
        {"photo": Workload.poisson(30.0), "name": Workload(arrivals=Gamma(rate=60.0, shape=0.2))},
        policy="flex",
        planner=None,
        duration_s=20.0,
        preempt_delay_s=0.005,
        latency_noise=0.1,
    )
    assert (report.batches.status == "preempted").any()
    assert (report.requests.outcome == "dropped").any()
    assert not (report.requests.outcome == "pending").any()


def test_groups_hold_all_workers():
    fields = {"kinds": (auto.Kind("gpu", 0, 1, group="a"), auto.Kind("cpu", 0, 1))}
    with pytest.raises(ValueError, match="'cpu' has no group"):
        simulate_application(
            replace(PROBLEM, **fields), {"name": at(0.0)}, policy="eager", planner=None
        )


def test_sizes_that_nothing_can_take_are_refused():
    sized = Workload(arrivals=Times(times_s=[0.0]), sizes=workloads.Measured(values=[5]))
    with pytest.raises(ValueError, match="'name' has 5 items, and the profiles of 'name' end at 4"):
        simulate_application(PROBLEM, {"name": sized}, policy=Fifo(), planner=None)

    class Counts(Fifo):
        counts_requests = True

    with pytest.raises(ValueError, match="counts requests, not the items in them"):
        simulate_application(PROBLEM, {"name": sized}, policy=Counts(), planner=None)


def test_sizes_that_are_not_told_take_their_time_all_the_same():
    sized = Workload(arrivals=Times(times_s=[0.0, 0.0]), sizes=workloads.Measured(values=[3]))
    variant = auto.Variant("name-v", 80.0, {"gpu": LatencyProfile([0.1, 0.2, 0.3])})
    problem = replace(PROBLEM, models=(PROBLEM.models[0], auto.Model("name", (variant,))))
    policy = Fifo()
    report = simulate_application(
        problem, {"name": sized}, policy=policy, planner=None, duration_s=1.0, tells_sizes=False
    )
    assert policy.log == [("name", "name", 1)] * 2
    assert report.batches.finished_s.tolist() == pytest.approx([0.3, 0.3])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["deferred"])
def test_a_run_is_logged_with_its_planner_and_replays(tmp_path, policy):
    models = scaled("see", 90.0, 80.0), scaled("hear", 85.0)
    tree = Tree("talk", (TreeTask("talk", "hear"), TreeTask("look", "see", "talk")), {"": 0.6})
    problem = auto.Problem(
        models, (tree, Tree.of_model("see", {"": 0.3})), {}, (auto.Kind("gpu", 1, 4),)
    )
    load = {"talk": Workload.poisson(20.0), "see": Workload.poisson(30.0)}
    times = {"duration_s": 12.0, "interval_s": 4.0, "start_s": 0.5, "load_s": 0.2}
    report = simulate_application(problem, load, policy=policy, log=tmp_path, **times)
    again = simulate_application(problem, load, policy=policy, **times)
    assert report.summary() == again.summary()
    (life,) = decision_log.read(tmp_path)
    assert life.start.about["application"] == "talk"
    replayed = replay(life)
    assert replayed.identical, replayed.difference
    assert replayed.actions > 100
    (planner,) = plans.read(tmp_path)
    assert planner.start.about["clock"] == life.start.about["clock"]
    assert [p.at for p in planner.plans] == report.plans.asked_s.tolist()
    assert planner.plans[0].targets == {"gpu": report.plans.workers[0]}


def test_every_group_has_a_log_of_its_own(tmp_path):
    kinds = (auto.Kind("a", 1, 1, group="left"), auto.Kind("b", 1, 1, group="right"))
    models = scaled("see", 90.0, kinds=("a", "b")), scaled("hear", 85.0, kinds=("a", "b"))
    trees = Tree.of_model("see", {"": 0.3}), Tree.of_model("hear", {"": 0.3})
    problem = auto.Problem(models, trees, {}, kinds, group_of={"see": "left", "hear": "right"})
    load = {"see": Workload.poisson(30.0), "hear": Workload.poisson(10.0)}
    simulate_application(problem, load, policy="deferred", duration_s=4.0, log=tmp_path)
    lives = decision_log.read(tmp_path)
    assert [life.scheduler for life in lives] == ["simulated-see-left", "simulated-see-right"]
    assert all(replay(life).identical for life in lives)
    arrived = [{r.model for r in tape(life).requests.values()} for life in lives]
    assert arrived == [{"see"}, {"hear"}]
