"""The brain of `auto`: from measurements to targets, assignments and reasons."""

from dataclasses import replace

import pytest

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning.auto import Demand, Kind, Model, Problem, Variant
from ray_slo.planning.brains.auto import AutoBrain
from ray_slo.planning.brains.auto_jobs import AutoSetting
from ray_slo.planning.brains.brain import Counts, NotYet, Seen, WorkerSays
from ray_slo.planning.brains.known import Known
from ray_slo.planning.result import best

PLAIN = {("m", "cpu"): LatencyProfile.linear(0.01, 0.02, 8)}  # 8 per batch of 100 ms: 80/s


def plain(least=1, most=8, rate=1.0, **setting):
    problem = Problem(
        (Model("m", (Variant("m", 100.0, {}),)),),
        (Tree.of_model("m", {"": 0.5}),),
        {"m": Demand(rate)},
        (Kind("cpu", least, most),),
    )
    cpu = frozenset({"cpu"})
    given = {"first_workers": {"cpu": 1}, "scales": cpu, "choosing": cpu}
    return AutoBrain(AutoSetting(problem, **{**given, **setting}))


def says(name, *loaded, kind="cpu", assigned=(), **fields):
    return WorkerSays(name, kind, frozenset(loaded), assigned, **fields)


def seen_of(*workers, profiles=PLAIN, **fields):
    return Seen({w.worker: w for w in workers}, profiles, **fields)


def workers(count, *loaded):
    return seen_of(*(says(f"w{i}", *(loaded or ("m",))) for i in range(count)))


class Host:
    """Asks a brain as the planner does, second by second, at the rates that a test says."""

    def __init__(self, brain, seen):
        self.brain, self.seen, self.now, self.why = brain, seen, 0.0, []
        self.tried_at = -100.0

    def run(self, seconds, rate=0.0, bad=0.0, stream="m", waiting=0):
        for _ in range(2 * seconds):
            self.now += 0.5
            bads, waits = {stream: round(bad / 2)}, {stream: waiting}
            counts = Counts({stream: round(rate / 2)}, bad=bads, waiting=waits)
            self.brain.counted(self.now, 0.5, counts)
            self.step()

    def step(self):
        why = self.brain.due(self.now, self.seen)
        if not why and self.now - self.tried_at >= 10:
            why = "period"
        if why and self.now - self.tried_at >= 1:
            self.plan(why)
        return self.brain.wanted(self.now, self.seen, False)

    def plan(self, why="asked"):
        self.tried_at = self.now
        self.why.append(why)
        job = self.brain.problem(self.now, self.seen)
        return self.brain.adopt(job, self.brain.solve(job))

    @property
    def target(self):
        return self.brain.target("cpu")


def test_a_plain_deployment_follows_its_load_up_at_once_and_down_after_an_interval():
    host = Host(plain(), workers(1))
    host.run(5, 10)
    assert host.target == 1
    host.run(3, 300)
    needed = host.target
    assert 4 <= needed <= 7  # 300/s of at most 80/s each
    assert host.why[1] == "demand changed"
    host.seen = workers(needed)
    host.run(10, 300)
    assert host.target == needed
    host.run(8, 10)
    assert host.target == needed  # the plan wants fewer, but not for ten seconds yet
    host.run(60, 10)
    assert host.target == 1


def test_every_worker_keeps_all_where_the_policy_chooses():
    brain = plain()
    assert brain.wanted(0.0, seen_of(says("a", ready=False), profiles={}), False)["a"].keep == (
        "m",
    )
    with pytest.raises(NotYet, match="no worker is there"):
        brain.problem(0.0, seen_of())
    with pytest.raises(NotYet, match="m not measured yet"):
        brain.problem(0.0, seen_of(says("a"), profiles={}))
    assert brain.due(0.0, workers(1)) == "first plan"
    # As many as there are, lest a planner that was restarted takes workers away.
    assert brain.target("cpu") is None
    assert brain.target("other") is None


def test_a_planner_that_is_restarted_at_zero_workers_starts_one_for_the_next_request():
    brain = plain()
    brain.wanted(0.0, seen_of(profiles={}), False)
    brain.counted(1.0, 0.5, Counts({"m": 3}))
    assert brain.target("cpu") is None  # nobody was ever there: the first ones are still coming
    brain.wanted(1.0, seen_of(), False)  # a frontend knows profiles
    assert brain.target("cpu") == 1


def test_no_more_workers_are_wanted_than_serve_can_run():
    host = Host(plain(), workers(1))
    host.run(5, 300)
    assert host.target >= 4
    host.brain.limit("cpu", 2)
    assert host.brain.due(host.now, host.seen) == "limits changed"
    host.seen = workers(2)
    assert "out of reach with 2 cpu" in host.plan().shortfall
    host.run(15, 300)  # fewer are wanted after an interval only
    assert host.target == 2


def test_without_any_plan_workers_load_all_unless_others_serve():
    """The first attempt failed. Who serves what an earlier planner said goes on."""
    known = {(v, "cpu"): PLAIN["m", "cpu"] for v in ("m", "n")}
    problem = Problem(
        (Model("m", (Variant("m", 90.0, {}), Variant("n", 80.0, {}))),),
        (Tree.of_model("m", {"": 0.5}),),
        {"m": Demand(1.0)},
        (Kind("cpu", 1, 4),),
    )
    brain = AutoBrain(AutoSetting(problem))
    nobody = seen_of(says("a", "m"), says("b"), profiles=known)
    told = brain.wanted(0.0, nobody, True)
    assert {w: (x.assigned, x.keep) for w, x in told.items()} == {
        "a": ((), ("m", "n")),
        "b": ((), ("m", "n")),
    }
    earlier = seen_of(says("a", "m", assigned=(Assigned("m", 4),)), says("b"), profiles=known)
    assert set(brain.wanted(0.0, earlier, True)) == {"b"}


@pytest.mark.slow
def test_what_goes_wrong_though_the_plan_is_in_force_adds_workers():
    host = Host(plain(), workers(2))
    host.run(5, 100)
    planned = host.target
    host.seen = workers(planned)
    host.run(3, 100)
    before = len(host.why)
    host.run(3, 100, bad=20)
    assert "bad rate" in host.why[before:]
    assert host.target > planned
    assert host.brain.status(host.seen)["planned_over_measured"]["m"] > 1.1
    host.seen = workers(host.target)
    host.run(400, 100)  # what was added fades
    assert host.target == planned
    assert "planned_over_measured" not in host.brain.status(host.seen)


def test_what_goes_wrong_while_workers_start_adds_nothing():
    host = Host(plain(), workers(1))
    host.run(20, 300, bad=150)
    assert "bad rate" not in host.why
    assert host.target <= 7


def test_what_goes_wrong_at_another_demand_adds_nothing():
    host = Host(plain(), workers(8))
    host.run(20, 100)
    host.brain.counted(host.now, 1.0, Counts({"m": 400}, bad={"m": 200}))
    assert host.brain.due(host.now, host.seen) == "demand changed"
    assert host.brain.problem(host.now, host.seen).factors == {"m": 1.0}


def test_a_few_bad_requests_are_chance():
    host = Host(plain(), workers(2))
    host.run(20, 100, bad=0)
    host.brain.counted(host.now, 0.5, Counts({"m": 50}, bad={"m": 4}))
    assert host.brain.due(host.now, host.seen) == ""


def test_down_to_nothing_when_nobody_asks_and_back_at_the_first_request():
    host = Host(plain(least=0, idle_s=60.0), workers(1))
    host.run(5, 10)
    host.run(55)
    assert host.target == 1
    host.run(10)
    assert host.why[-1] == "idle"
    assert host.target == 0
    host.seen = seen_of()  # its last worker is gone
    host.run(20)
    assert host.target == 0
    host.run(1, 2)
    assert "first request" in host.why
    assert host.target == 1
    host.run(150, waiting=1)  # its worker takes long to start
    assert host.target == 1
    host.run(150)
    assert host.target == 0


def test_the_first_worker_may_take_longer_to_start_than_a_stream_takes_to_be_idle():
    host = Host(plain(least=0, idle_s=10.0), seen_of(says("a", ready=False)))
    host.run(60)
    assert host.target == 1
    host.seen = workers(1)
    host.run(9)
    assert host.target == 1
    host.run(10)
    assert host.target == 0


def test_nobody_there_and_nothing_known_one_worker_measures():
    brain = plain(least=0, idle_s=60.0, first_workers={"cpu": 0})
    assert brain.target("cpu") is None
    brain.counted(1.0, 0.5, Counts(waiting={"m": 1}))  # it came before this planner
    assert brain.target("cpu") == 1
    brain.wanted(1.0, seen_of(says("a", ready=False), profiles={}), False)
    assert brain.target("cpu") is None


def test_what_is_beyond_all_workers_is_said():
    host = Host(plain(most=2), workers(2))
    host.run(3, 1000)
    verdict = host.plan()
    assert verdict.shortfall
    assert verdict.why.startswith("Best effort, as ")
    assert host.target == 2
    host.run(5, 1000, bad=800)  # more than there is cannot be asked for
    assert "bad rate" not in host.why[1:]


def test_how_long_workers_take_to_start_is_known():
    brain = plain()
    assert brain.start_s is None
    one = seen_of(says("a", "m", ready_s=4.0), says("b", ready=False))
    brain.due(0.0, one)
    both = seen_of(says("a", "m", ready_s=4.0), says("b", "m", ready_s=7.0))
    brain.due(1.0, both)
    brain.due(2.0, both)
    assert brain.start_s == 7.0
    assert brain.status(both)["start_s"] == {"cpu": 7.0}


# -- assignments: two models on one worker each, a pipeline with variants ---------------------

SECONDS = {"det": 0.02, "large": 0.05, "small": 0.01}


def tree(most=4, rate=10.0, kinds=("cpu",), slo_s=1.0, accuracy_floor=0.0, **setting):
    problem = Problem(
        (
            Model("detect", (Variant("det", 90.0, {}),)),
            Model("name", (Variant("large", 90.0, {}), Variant("small", 70.0, {}))),
        ),
        (
            Tree(
                "photo",
                (
                    TreeTask("detect", "detect", None, {"det": {"name": 1.0}}),
                    TreeTask("name", "name", "detect"),
                ),
                {"": slo_s},
            ),
        ),
        {"photo": Demand(rate)},
        tuple(Kind(kind, 1, most) for kind in kinds),
        accuracy_floor=accuracy_floor,
        batch_sizes=(1,),
        sharing=False,
        headroom=False,
    )
    given = {"first_workers": dict.fromkeys(kinds, 1), "scales": frozenset(kinds)}
    return AutoBrain(AutoSetting(problem, **{**given, **setting}))


def profiles_of(*kinds, without=()):
    return {
        (v, k): LatencyProfile([s]) for v, s in SECONDS.items() for k in kinds if v not in without
    }


TREE = profiles_of("cpu")


def variants_of(told):
    return {w: tuple(part.variant for part in one.assigned) for w, one in told.items()}


def test_the_first_workers_of_each_kind_share_out_what_nobody_has_measured():
    brain = tree(kinds=("cpu", "gpu"), first_workers={"cpu": 2, "gpu": 1})
    three = seen_of(says("a"), says("b"), says("g", kind="gpu"), profiles={})
    told = brain.wanted(0.0, three, False)
    assert {w: one.keep for w, one in told.items()} == {
        "a": ("det", "large"),
        "b": ("small",),
        "g": ("det", "large", "small"),
    }
    with pytest.raises(NotYet, match="det, large, small not measured"):
        brain.problem(0.0, three)
    known = profiles_of("cpu", "gpu")
    host = Host(brain, seen_of(says("a", "det", "large"), says("b", "small"), profiles=known))
    host.plan()
    # One of a kind that nobody has measured on comes later: it measures.
    brain = tree(kinds=("cpu", "gpu"))
    host = Host(brain, seen_of(says("a", *SECONDS), profiles=profiles_of("cpu")))
    host.plan()
    host.seen = seen_of(says("a", *SECONDS), says("g", kind="gpu"), profiles=profiles_of("cpu"))
    assert host.step()["g"].keep == ("det",)


def test_workers_have_what_the_plan_says_and_those_that_start_what_they_will_need():
    host = Host(tree(rate=30.0), seen_of(says("a", *SECONDS), profiles=TREE))
    host.plan()
    assert host.target == 3  # a detector for 50/s, two large ones for 20/s each
    two = (says("a", *SECONDS), says("b", ready=False), says("c", ready=False))
    host.seen = seen_of(*two, profiles=TREE)
    told = host.step()
    assert sorted(sum(variants_of({"b": told["b"], "c": told["c"]}).values(), ())) in (
        ["large", "large"],
        ["det", "large"],
    )
    started = told["b"].assigned[0].variant
    # It is ready: it serves what it loaded before there is another plan.
    now = seen_of(says("a", *SECONDS), says("b", started), says("c", ready=False), profiles=TREE)
    assert variants_of(host.brain.wanted(host.now, now, False))["b"] == (started,)


@pytest.mark.parametrize(
    ("slo_s", "floor", "planned"),
    [
        (0.07, 0.0, [("det",), ("small",)]),  # 2 · (20 + 10) ms
        (0.055, 0.0, [("det",), ("small",)]),  # 20 + 10 ms: in time, if nobody waits
        (0.025, 0.0, [("det", "small")]),  # too slow, but the client may bring a longer SLO
        (0.025, 50.0, []),  # it does not want the fastest at any accuracy
    ],
)
def test_an_slo_that_leaves_no_time_to_wait_is_served_as_far_as_possible(slo_s, floor, planned):
    host = Host(
        tree(slo_s=slo_s, accuracy_floor=floor), seen_of(says("a", *SECONDS), profiles=TREE)
    )
    verdict = host.plan()
    assert (verdict.shortfall is None) == (slo_s > 0.06)
    if verdict.shortfall is not None:
        assert "the SLO of photo, 0.0" in verdict.shortfall and "is too short" in verdict.shortfall
    slots = best(host.brain._solved.whole).slots
    assert sorted({tuple(sorted(slot.variants)) for slot in slots}) == planned


def test_who_alone_serves_a_task_goes_on_until_another_can():
    host = Host(tree(rate=10.0), seen_of(says("a", *SECONDS), says("b", *SECONDS), profiles=TREE))
    host.plan()
    first = host.step()
    assert sorted(variants_of(first).values()) == [("det",), ("large",)]
    large = next(w for w, one in first.items() if one.assigned[0].variant == "large")
    det = "ab".replace(large, "")

    def serving(worker, *loaded):
        parts = first[worker].assigned
        return says(worker, *loaded, assigned=parts)

    # Both swap: neither lets go of its task before the other has loaded it.
    brain = host.brain
    brain._steps._told = {large: frozenset({"det"}), det: frozenset({"large"})}
    both = seen_of(serving(large, "large"), serving(det, "det"), profiles=TREE)
    told = brain.wanted(host.now, both, False)
    assert variants_of(told) == {large: ("large",), det: ("det",)}
    assert set(told[large].keep) == {"large", "det"} == set(told[det].keep)
    brain._steps._told = {large: frozenset({"det"}), det: frozenset({"large"})}
    done = seen_of(serving(large, "large", "det"), serving(det, "det", "large"), profiles=TREE)
    told = brain.wanted(host.now, done, False)
    assert variants_of(told) == {large: ("det",), det: ("large",)}


def test_factors_and_sizes_are_learned():
    host = Host(tree(), seen_of(says("a", *SECONDS), profiles=TREE))
    for i in range(1, 40):
        made = {"det": {"name": 40}}
        counts = Counts({"photo": 10}, {"det": 10}, made, {"detect": {4: 10}})
        host.brain.counted(0.5 * i, 0.5, counts)
    host.now = 20.0
    problem = host.brain.problem(20.0, host.seen).whole
    assert problem.trees[0]["detect"].factor("det", "name") == pytest.approx(4, abs=0.3)
    assert problem.model["detect"].items == 4
    assert problem.model["name"].items == 1


def test_sizes_that_became_rare_are_forgotten():
    kinds = Kind("cpu", 1, 8), Kind("gpu", 1, 8)
    models = (Model("m", (Variant("m", 100.0, {}),), 1.5),)
    tree = Tree.of_model("m", {"": 0.5})
    known = Known(Problem(models, (tree,), {"m": Demand(1.0)}, kinds), {})
    seen = seen_of(profiles={("m", kind): PLAIN["m", "cpu"] for kind in ("cpu", "gpu")})

    def after(sizes):
        known.counted(Counts(sizes={"m": sizes}))
        (found,) = known.asked(seen, {}, lambda says: frozenset()).models
        return found.items, found.sizes

    assert after({}) == (1.5, ())
    assert after({3: 10}) == (3.0, ())  # too few for classes
    items, sizes = after({1: 30})
    assert items == pytest.approx((3 * 10 + 30) / 40)
    assert [(s.largest, s.items) for s in sizes] == [(1, 1.0), (3, 3.0)]
    assert [s.share for s in sizes] == pytest.approx([30 / 40, 10 / 40])
    assert after({1: 20_000}) == (1.0, ())


def test_what_does_not_fit_is_not_loaded_beside():
    big = {(v, "cpu"): 600.0 for v in SECONDS}
    host = Host(
        tree(rate=10.0, choosing=frozenset({"cpu"})),
        seen_of(says("a", "det"), says("b"), profiles=TREE, memory_mb=big, room_mb={"cpu": 1000.0}),
    )
    host.plan()
    told = host.step()  # the policy chooses, but among what the plan has loaded
    assert {one.assigned for one in told.values()} == {()}
    assert sorted(one.keep for one in told.values()) == [("det",), ("large",)]
    small = seen_of(says("a", "det"), says("b"), profiles=TREE, room_mb={"cpu": 1e6})
    assert set(host.brain.wanted(host.now, small, False)["b"].keep) == set(SECONDS)


def test_arguments_change_while_it_runs():
    host = Host(tree(), seen_of(says("a", *SECONDS), profiles=TREE))
    host.plan()
    assert host.brain.tune({}) is False
    assert host.brain.tune({"accuracy_floor": 80.0}) is True
    assert host.brain.due(host.now, host.seen) == "arguments changed"
    host.plan()
    assert host.brain.due(host.now, host.seen) == ""
    with pytest.raises(ValueError, match="no such argument"):
        host.brain.tune({"floor": 1.0})
    assert "budget_per_hour" not in host.brain.inputs(host.now, host.seen)
    assert host.brain.tune({"budget_per_hour": 2.0}) is True
    assert host.brain.inputs(host.now, host.seen)["budget_per_hour"] == 2.0
    with pytest.raises(ValueError, match="accuracy_floor"):
        host.brain.tune({"accuracy_floor": 101.0})


def test_nothing_that_can_be_loaded_leaves_the_last_plan():
    host = Host(tree(), seen_of(says("a", *SECONDS), profiles=TREE))
    host.plan()
    avoided = frozenset({("large", "cpu"), ("small", "cpu")})
    host.seen = seen_of(says("a", "det"), profiles=TREE, avoided=avoided)
    assert host.brain.due(1.0, host.seen) == "profiles known"
    with pytest.raises(ValueError, match="no variant of name can be loaded; the last plan holds"):
        host.brain.problem(1.0, host.seen)


# -- fewer workers ----------------------------------------------------------------------------


def falling():
    """Three workers of which two are enough, and the only recogniser is the youngest."""
    three = (says("a", "det"), says("b", "det"), says("c", "large"))
    host = Host(tree(rate=10.0), seen_of(*three, profiles=TREE))
    host.run(1, 10, stream="photo")
    for _ in range(30):
        host.run(1, 10, stream="photo")
    return host


def obey(host, told):
    """Workers load what they are told, and serve it."""
    host.seen = seen_of(
        *(says(w, *one.keep, assigned=one.assigned) for w, one in told.items()), profiles=TREE
    )


def test_nobody_goes_before_those_that_stay_have_what_the_plan_wants():
    host = falling()
    assert host.brain._planned(host.now) == {"cpu": 2}
    told = host.step()
    # The slot of the recogniser is of one that stays; the number holds until it is there.
    assert [w for w in "ab" if "large" in told[w].keep]
    assert host.target == 3
    assert "large" in told["c"].keep
    obey(host, told)
    told = host.step()
    assert "det" in told["c"].keep  # a spare: Serve may stop the only detector
    obey(host, told)
    told = host.step()
    assert host.target == 2


@pytest.mark.parametrize("gone", "abc")
def test_whichever_worker_goes_both_tasks_are_served_and_the_plan_is_taken_up_at_once(gone):
    host = falling()
    for _ in range(4):
        obey(host, host.step())
    assert host.target == 2
    rest = {w: s for w, s in host.seen.workers.items() if w != gone}
    assert {"det"} <= set().union(*(s.loaded for s in rest.values()))
    assert {"large", "small"} & set().union(*(s.loaded for s in rest.values()))
    host.seen = seen_of(*rest.values(), profiles=TREE)
    told = host.brain.wanted(host.now, host.seen, False)
    assert sorted(variants_of(told).values()) == [("det",), ("large",)]
    assert all(set(variants_of(told)[w]) <= rest[w].loaded for w in rest)
    assert host.target == 2


def test_a_slot_is_not_for_one_that_starts_and_is_not_needed():
    host = falling()
    for _ in range(4):
        obey(host, host.step())
    two = [s for w, s in host.seen.workers.items() if w != "c"]
    host.seen = seen_of(*two, says("d", ready=False), profiles=TREE)
    told = host.step()
    assert not told["d"].assigned
    assert sorted(variants_of({w: told[w] for w in "ab"}).values()) == [("det",), ("large",)]


@pytest.mark.parametrize(
    ("room_mb", "floor", "keeps"),
    [(1800.0, 0.0, {"large", "small"}), (1100.0, 0.0, {"large"}), (1800.0, 75.0, {"large"})],
)
def test_quick_variants_are_kept_in_reserve_where_there_is_memory(room_mb, floor, keeps):
    host = Host(
        tree(rate=10.0, most=2),
        seen_of(
            says("a", *SECONDS),
            says("b", *SECONDS),
            profiles=TREE,
            memory_mb={(v, "cpu"): 600.0 for v in SECONDS},
            room_mb={"cpu": room_mb},
        ),
    )
    host.brain.tune({"accuracy_floor": floor, "headroom": True})
    host.plan()
    for _ in range(3):  # what is not wanted goes before the reserve comes
        told = host.step()
        workers = [says(w, *one.keep, assigned=one.assigned) for w, one in told.items()]
        host.seen = replace(host.seen, workers={w.worker: w for w in workers})
    large = next(one for one in told.values() if one.assigned[0].variant == "large")
    assert set(large.keep) == keeps
    assert {part.variant for part in large.assigned} == {"large"}


def test_sizes_are_classes_where_workers_are_unlike():
    profiles = {
        ("m", "cpu"): LatencyProfile.linear(0.004, 0.006, 100),
        ("m", "gpu"): LatencyProfile.linear(0.001, 0.003, 100),
    }

    def sizes_of(*kinds, counts, times=1):
        problem = Problem(
            (Model("m", (Variant("m", 100.0, {}),)),),
            (Tree.of_model("m", {"": 0.2}),),
            {"m": Demand(1.0)},
            tuple(Kind(kind, 1, 2) for kind in kinds),
        )
        first = dict.fromkeys(kinds, 1)
        brain = AutoBrain(AutoSetting(problem, first, choosing=frozenset(kinds)))
        for _ in range(times):
            brain.counted(1.0, 1.0, Counts({"m": sum(counts.values())}, sizes={"m": counts}))
        there = seen_of(*(says(f"w{k}", "m", kind=k) for k in kinds), profiles=profiles)
        return brain.problem(2.0, there).whole.models[0]

    both = sizes_of("cpu", "gpu", counts={1: 90, 60: 10})
    assert [(size.largest, size.share) for size in both.sizes] == [(1, 0.9), (60, 0.1)]
    assert both.items == pytest.approx(6.9)
    assert sizes_of("cpu", counts={1: 90, 60: 10}).sizes == ()  # they are all alike
    assert sizes_of("cpu", "gpu", counts={1: 9, 60: 1}).sizes == ()  # too few were seen
    assert sizes_of("cpu", "gpu", counts={3: 100}).sizes == ()
    # One that no worker has in time is refused, whatever is planned.
    assert [s.largest for s in sizes_of("cpu", "gpu", counts={1: 90, 60: 10, 500: 1}).sizes] == [
        1,
        60,
    ]
    many = sizes_of("cpu", "gpu", counts=dict.fromkeys(range(1, 97), 1), times=100)
    assert 3 <= len(many.sizes) <= 7
    assert sum(size.share for size in many.sizes) == pytest.approx(1)
