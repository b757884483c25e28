"""Loki's brain: from measurements to problems, targets and assignments."""

import pytest

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.core.profiles import save_profiles
from ray_slo.planning.brains.brain import Counts, NotYet, Seen, Wanted, WorkerSays
from ray_slo.planning.brains.loki import best
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.planner.plugin import make_brain

# ℓ in seconds: "large" serves 20/s, "small" 100/s, the detector 50/s.
SECONDS = {"det": 0.02, "large": 0.05, "small": 0.01}
ALL = tuple(SECONDS)


def variant(name, accuracy, **fields):
    return {"load": "apps:Network", "args": [name, SECONDS[name]], "accuracy": accuracy, **fields}


def spec_of(num_replicas=1, max_replicas=4, rate=10.0, **planner):
    detect = {"det": variant("det", 90, factors={"name": 1.0})}
    name = {"large": variant("large", 90), "small": variant("small", 70)}
    kwargs = {"headroom_quantile": None, "batch_sizes": [1], **planner.pop("kwargs", {})}
    return parse_spec(
        {
            "pipeline": {
                "latency_slo_ms": 1000,
                "tasks": {
                    "detect": {"callable": "apps:Named", "variants": detect},
                    "name": {"callable": "apps:Named", "parent": "detect", "variants": name},
                },
            },
            "workers": {"default": {"num_replicas": num_replicas, "max_replicas": max_replicas}},
            "planner": {"name": "loki", "rates": {"detect": rate}, "kwargs": kwargs, **planner},
        }
    )


def says(name, loaded=(), assigned=None, ready=True):
    what = () if assigned is None else (Assigned(assigned, 1),)
    return WorkerSays(name, "default", frozenset(loaded), what, ready=ready)


def seen_of(*workers, without=(), avoided=()):
    profiles = {(v, "default"): LatencyProfile([s]) for v, s in SECONDS.items() if v not in without}
    keys = frozenset((v, "default") for v in avoided)
    return Seen({w.worker: w for w in workers}, profiles, keys)


def planned(brain, seen, now=0.0):
    problem = brain.problem(now, seen)
    return brain.adopt(problem, brain.solve(problem))


def assigned(brain, seen):
    wanted = brain.wanted(0.0, seen, False)
    return {w: x.assigned[0].variant if x.assigned else None for w, x in wanted.items()}


def test_the_first_workers_load_what_nobody_has_measured():
    brain = make_brain(spec_of())
    seen = seen_of(says("w"), without=ALL)
    assert brain.wanted(0.0, seen, False)["w"].keep == ALL
    with pytest.raises(NotYet, match="det, large, small not measured"):
        brain.problem(0.0, seen)
    assert brain.target("default") is None


def test_the_first_workers_share_out_what_nobody_has_measured():
    brain = make_brain(spec_of(num_replicas=2))
    first = brain.wanted(0.0, seen_of(says("a"), without=ALL), False)
    assert {w: x.keep for w, x in first.items()} == {"a": ("det", "large")}
    both = brain.wanted(0.0, seen_of(says("a"), says("b"), without=ALL), False)
    assert {w: x.keep for w, x in both.items()} == {"a": ("det", "large"), "b": ("small",)}
    # A third one has nothing to measure, and waits for a plan.
    assert set(brain.wanted(0.0, seen_of(says("a"), says("b"), says("c"), without=ALL), False)) == {
        "a",
        "b",
    }


def test_who_is_done_measures_what_was_left_for_a_worker_that_never_came():
    brain = make_brain(spec_of(num_replicas=3))
    assert brain.wanted(0.0, seen_of(says("a"), without=ALL), False)["a"].keep == ("det",)
    done = seen_of(says("a", ["det"]), without=("large", "small"))
    assert brain.wanted(0.0, done, False)["a"].keep == ("det", "large")
    done = seen_of(says("a", ["det", "large"]), without=("small",))
    assert set(brain.wanted(0.0, done, False)["a"].keep) == set(ALL)


def test_what_a_worker_took_along_or_could_not_load_is_shared_out_again():
    brain = make_brain(spec_of(num_replicas=2))
    brain.wanted(0.0, seen_of(says("a"), says("b"), without=ALL), False)
    left = brain.wanted(0.0, seen_of(says("b", ["small"]), without=("det", "large")), False)
    assert left["b"].keep == ("small", "det")
    left = brain.wanted(0.0, seen_of(says("b"), without=ALL, avoided=["small", "det"]), False)
    assert left["b"].keep == ("large",)
    # Of a task that nobody can load anything of, workers are told all, and end.
    hopeless = seen_of(says("b"), without=ALL, avoided=["det"])
    assert set(brain.wanted(0.0, hopeless, True)["b"].keep) == set(ALL)


def test_known_profiles_are_planned_with_at_once_also_those_of_files(tmp_path):
    seen = seen_of(says("w"))
    assert make_brain(spec_of()).wanted(0.0, seen, False) == {}  # there will be a plan in a moment
    path = tmp_path / "profiles.json"
    save_profiles(path, {v: LatencyProfile([s] * 8) for v, s in SECONDS.items()})
    spec = spec_of()
    for task in spec.models.values():
        task.profile = str(path)
    nothing = seen_of(says("w"), without=ALL)
    problem = make_brain(spec).problem(0.0, nothing).problem
    assert problem.tasks[0].variants[0].profile.latency(8) == 0.02


def test_nobody_there_is_nothing_to_plan():
    with pytest.raises(NotYet, match="no worker"):
        make_brain(spec_of()).problem(0.0, seen_of())


def test_few_requests_take_few_workers_many_take_more_and_then_accuracy():
    brain = make_brain(spec_of(rate=10.0))
    workers = [says(f"w{i}", ALL) for i in range(4)]
    seen = seen_of(*workers)
    assert planned(brain, seen).shortfall is None
    assert brain.target("default") == 2
    assert sorted(map(str, assigned(brain, seen).values())) == ["None", "None", "det", "large"]
    assert brain.target("other") is None

    for second in range(1, 6):
        brain.counted(float(second), 1.0, Counts({"detect": 40}))
    assert brain.due(5.0, seen)
    verdict = planned(brain, seen, now=5.0)
    assert "Hardware scaling" in verdict.why
    assert brain.target("default") == 3  # 1 detector and 40/20 of the large ones

    for second in range(6, 11):
        brain.counted(float(second), 1.0, Counts({"detect": 100}))
    assert "Accuracy scaling" in planned(brain, seen, now=10.0).why
    assert brain.target("default") == 4
    assert sorted(assigned(brain, seen).values()) == ["det", "det", "large", "small"]


def test_what_cannot_be_served_is_said_and_all_workers_are_used():
    brain = make_brain(spec_of(rate=1000.0))
    seen = seen_of(*[says(f"w{i}", ALL) for i in range(4)])
    verdict = planned(brain, seen)
    assert "out of reach with 4 workers: 10 % of it can be served" in verdict.shortfall
    assert "90 % is shed" in verdict.why
    assert brain.target("default") == 4
    assert None not in assigned(brain, seen).values()


def test_while_replicas_start_those_that_are_there_trade_accuracy():
    brain = make_brain(spec_of(rate=40.0))
    seen = seen_of(says("a", ALL), says("b", ALL))
    verdict = planned(brain, seen)
    assert brain.target("default") == 3
    assert "With the 2 that are there: Accuracy scaling" in verdict.why
    assert sorted(assigned(brain, seen).values()) == ["det", "small"]
    third = seen_of(*seen.workers.values(), says("c"))
    assert brain.due(0.0, third)  # its arrival is worth a plan
    planned(brain, third)
    assert sorted(assigned(brain, third).values()) == ["det", "large", "large"]
    fourth = seen_of(*third.workers.values(), says("d"))
    assert not brain.due(0.0, fourth)  # nobody needs that one


def test_a_worker_that_starts_loads_what_it_will_do_and_the_others_go_on_meanwhile():
    brain = make_brain(spec_of(rate=40.0))
    two = says("a", ["det"], "det"), says("b", ["small"], "small")
    planned(brain, seen_of(*two))
    assert assigned(brain, seen_of(*two)) == {"a": "det", "b": "small"}
    starting = seen_of(*two, says("c", ready=False))
    assert not brain.due(0.0, starting)
    assert assigned(brain, starting) == {"a": "det", "b": "small", "c": "large"}
    up = seen_of(*two, says("c", ["large"], "large"))
    assert brain.due(0.0, up)
    planned(brain, up)
    assert assigned(brain, up) == {"a": "det", "b": "large", "c": "large"}


def test_with_fewer_workers_than_tasks_each_serves_all_tasks():
    for rate, keep, target in ((10.0, {"det", "large"}, 2), (25.0, {"det", "small"}, 3)):
        brain = make_brain(spec_of(rate=rate))
        seen = seen_of(says("w", ["small"]))
        verdict = planned(brain, seen)
        assert verdict.shortfall is None  # with the workers that there may be
        assert "each serves" not in verdict.why
        wanted = brain.wanted(0.0, seen, False)["w"]
        assert wanted.assigned == ()
        assert set(wanted.keep) == keep  # a worker has time for the large one at 10 requests/s
        assert brain.target("default") == target


def test_where_there_will_never_be_a_worker_per_task_the_plan_says_so():
    brain = make_brain(spec_of(max_replicas=1))
    verdict = planned(brain, seen_of(says("w")))
    assert verdict.shortfall == "1 worker for 2 tasks: it serves all of them"
    assert brain.target("default") == 1
    assert brain.outcome()["shared"]


def test_an_slo_that_no_variant_can_meet_is_said_and_workers_are_ready_for_other_slos():
    spec = spec_of(kwargs={})
    next(iter(spec.pipelines.values())).latency_slo_ms = 30.0
    brain = make_brain(spec)
    seen = seen_of(says("a"), says("b"))
    verdict = planned(brain, seen)
    assert verdict.shortfall == (
        "no variants are fast enough: the fastest path takes 30 ms in execution alone, and the SLO "
        "leaves 25 ms"
    )
    assert assigned(brain, seen) == {"a": "det", "b": "small"}


def test_a_worker_goes_on_with_what_it_does():
    brain = make_brain(spec_of(rate=10.0))
    seen = seen_of(says("a", ["large"], "large"), says("b", ["det"], "det"), says("c"))
    planned(brain, seen)
    assert assigned(brain, seen) == {"a": "large", "b": "det", "c": None}


def test_those_that_serve_will_take_away_hand_over_first():
    brain = make_brain(spec_of(rate=10.0))  # for one detector and one "large"
    three = [says("old", ["det"], "det"), says("mid", ["small"], "small")]
    young = says("young", ["large"], "large")
    seen = seen_of(*three, young)
    planned(brain, seen)
    assert assigned(brain, seen) == {"old": "det", "mid": "large", "young": "large"}
    later = seen_of(three[0], says("mid", ["small", "large"], "large"), young)
    wanted = brain.wanted(0.0, later, False)
    assert wanted["young"] == Wanted((), ("large",))
    assert wanted["mid"].keep == ("large",)


def test_where_nobody_is_taken_away_whoever_has_a_variant_serves():
    brain = make_brain(spec_of(num_replicas=3, max_replicas=None, rate=10.0))
    workers = says("a", ["det"], "det"), says("b", ["small"], "small")
    seen = seen_of(*workers, says("c", ["large"], "large"))
    planned(brain, seen)
    assert assigned(brain, seen) == {"a": "det", "b": None, "c": "large"}


def test_the_only_worker_of_a_task_stays_until_another_can_take_over():
    brain = make_brain(spec_of(rate=10.0))
    first = seen_of(says("a", ["det"], "det"), says("b", ["large"], "large"))
    planned(brain, first)
    # b is gone and c has come: one of them has to leave what it does.
    brain._told = {"a": "large", "c": "det"}
    before = seen_of(says("a", ["det"], "det"), says("c"))
    wanted = brain.wanted(0.0, before, False)
    assert (wanted["a"].assigned[0].variant, wanted["a"].keep) == ("det", ("det", "large"))
    assert (wanted["c"].assigned[0].variant, wanted["c"].keep) == ("det", ("det",))
    after = seen_of(says("a", ["det", "large"], "det"), says("c", ["det"], "det"))
    wanted = brain.wanted(0.0, after, False)
    assert (wanted["a"].assigned[0].variant, wanted["a"].keep) == ("large", ("large",))


def test_a_variant_that_cannot_be_loaded_is_avoided_and_measured_later():
    brain = make_brain(spec_of(rate=10.0))
    workers = says("a", ["det", "small"]), says("b", ["det", "small"]), says("c")
    seen = seen_of(*workers, without=["large"], avoided=["large"])
    planned(brain, seen)
    assert set(assigned(brain, seen).values()) == {"det", "small", None}
    later = seen_of(*workers, without=["large"])  # nobody knows how long it takes
    wanted = brain.wanted(0.0, later, False)
    trying = [w for w, x in wanted.items() if "large" in x.keep]
    assert [wanted[w].assigned for w in trying] == [()]
    with pytest.raises(ValueError, match="no variant of detect can be loaded"):
        brain.problem(0.0, seen_of(*workers, avoided=["det"]))


def test_who_runs_something_goes_on_until_there_is_a_plan():
    brain = make_brain(spec_of())
    seen = seen_of(says("a", ["det"], "det"), says("b", ["small"], "small"), says("c"))
    assert brain.wanted(0.0, seen, False) == {}
    assert brain.target("default") is None
    # A successor knows what runs, and plans even with what it does not know.
    known = seen_of(*seen.workers.values(), without=["large"])
    assert set(brain.wanted(0.0, known, False)) == {"c"}
    assert {v.name for t in brain.problem(0.0, known).problem.tasks for v in t.variants} == {
        "det",
        "small",
    }


def test_without_hope_for_a_plan_workers_load_everything():
    brain = make_brain(spec_of())
    assert brain.wanted(0.0, seen_of(says("w")), True)["w"].keep == ALL


def test_demand_and_factors_are_measured():
    brain = make_brain(spec_of(rate=3.0))
    assert brain.rate(0.0) == 3.0
    for i in range(40):
        brain.counted(0.5 * i, 0.5, Counts({"detect": 10}, {"det": 10}, {"det": {"name": 40}}))
    assert brain.rate(20.0) == pytest.approx(20.0, rel=0.2)
    seen = seen_of(says("w"))
    factors = brain.problem(20.0, seen).problem.tasks[0].variants[0].factors
    assert factors == {"name": pytest.approx(3.86, rel=0.01)}  # 20 at 1, 400 at 4
    brain.adopt(problem := brain.problem(20.0, seen), brain.solve(problem))
    assert not brain.due(20.0, seen)
    brain.counted(20.4, 0.5, Counts({"detect": 150}))
    assert brain.due(20.5, seen)
    assert brain.rate(20.5) == 160  # in one second: the average has not noticed yet
    assert brain.rate(200.0) == 0.1


def test_a_task_that_gets_nothing_keeps_a_worker():
    brain = make_brain(spec_of(rate=10.0))
    brain.counted(1.0, 1.0, Counts({"detect": 0}, {"det": 10**7}, {}))
    seen = seen_of(says("a"), says("b"))
    planned(brain, seen)
    assert sorted(assigned(brain, seen).values()) == ["det", "large"]


def test_a_budget_of_accuracy_for_swaps_and_no_headroom_beyond_what_is_asked():
    problem = make_brain(spec_of(kwargs={"headroom_quantile": 0.9})).problem(
        0.0, seen_of(says("w"))
    )
    assert problem.problem.headroom_quantile == 0.9
    assert problem.problem.swap_cost == 0.1
    assert problem.problem.slo_s == pytest.approx(0.995)  # the way back is kept free
    assert best(make_brain(spec_of()).solve(problem).whole).step == "hardware"


def test_who_has_just_become_ready_takes_its_place_in_the_plan_for_all_at_once():
    brain = make_brain(spec_of(rate=30.0))  # a detector and two large ones, for 3 workers
    planned(brain, seen_of(says("a", ALL), says("b", ALL)))
    assert brain.target("default") == 3
    told = brain.wanted(0.0, seen_of(says("a", ALL), says("b", ALL), says("c", ready=False)), False)
    started = told["c"].assigned[0].variant
    ready = seen_of(says("a", ALL), says("b", ALL), says("c", [started]))
    assert brain.wanted(0.0, ready, False)["c"].assigned == told["c"].assigned
