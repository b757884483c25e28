"""Serve chooses which workers to stop. Every model that the plan serves keeps a worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_slo.planning.auto import Slot
from ray_slo.planning.brains.brain import Wanted, WorkerSays
from ray_slo.planning.brains.leaving import Leaving, staying

MODELS = {"a": "a", "b": "b", "c1": "c", "c2": "c"}


def says(name, *loaded, kind="cpu"):
    return WorkerSays(name, kind, frozenset(loaded))


def named(*workers):
    return {w.worker: w for w in workers}


def slot(*variants, kind="cpu"):
    return Slot(kind, (), variants)


def roomy(variants, kind):
    return True


def look(targets, workers, slots, fits=roomy):
    leaving = Leaving(MODELS)
    leaving.look(targets, workers, slots, fits)
    return leaving


def test_those_stay_that_are_first_of_their_kind_and_all_where_nobody_would():
    workers = named(says("v"), says("w"), says("x", kind="gpu"), says("y", kind="gpu"))
    assert list(staying({"cpu": 1}, workers)) == ["v", "x", "y"]
    assert list(staying({"cpu": 0, "gpu": 1}, workers)) == ["x"]
    assert list(staying({"cpu": 0, "gpu": 0}, workers)) == list(workers)


def test_a_number_falls_when_those_that_stay_have_loaded_what_the_plan_wants():
    slots = [slot("a"), slot("b")]
    early = look({"cpu": 2}, named(says("v", "a"), says("w", "a"), says("x", "b")), slots)
    assert early.least == {"cpu": 3}  # b is on the one that goes
    ready = look({"cpu": 2}, named(says("v", "a"), says("w", "b"), says("x", "a", "b")), slots)
    assert (ready.least, ready.spares) == ({"cpu": 2}, {})


def test_workers_with_everything_go_at_once():
    workers = named(*(says(f"w{i}", *MODELS) for i in range(5)))
    assert look({"cpu": 1}, workers, [slot(*MODELS)]).least == {"cpu": 1}
    assert look({"cpu": 5}, workers, [slot(*MODELS)]).least == {}


def test_the_last_worker_of_a_kind_waits_for_one_of_another_kind():
    slots = [slot("a", kind="gpu")]
    alone = look({"cpu": 0}, named(says("v", "a"), says("w", "a")), slots)
    assert alone.least == {"cpu": 1}
    starting = named(says("v", "a"), says("g", kind="gpu"))
    assert look({"cpu": 0}, starting, slots).least == {"cpu": 1, "gpu": 1}
    there = named(says("v", "a"), says("g", "a", kind="gpu"))
    assert look({"cpu": 0}, there, slots).least == {"cpu": 0, "gpu": 1}


def test_a_model_that_the_plan_does_not_serve_holds_nobody():
    assert look({"cpu": 0}, named(says("v", "a")), []).least == {"cpu": 0}


def test_without_memory_for_spares_the_youngest_are_taken_to_go():
    slots, workers = [slot("a"), slot("b")], named(says("v", "a"), says("w", "b"), says("x", "a"))

    def tight(variants, kind):
        return len(variants) < 2

    assert look({"cpu": 2}, workers, slots, tight).least == {"cpu": 2}
    later = named(says("v", "a"), says("w", "a"), says("x", "b"))
    assert look({"cpu": 2}, later, slots, tight).least == {"cpu": 3}  # w loads b first


@st.composite
def falls(draw):
    """Workers of two kinds, a plan for fewer of them, and how much they have room for."""
    sets = st.frozensets(st.sampled_from(sorted(MODELS)), min_size=1, max_size=3)
    kinds = st.sampled_from(["cpu", "gpu"])
    workers = draw(st.lists(st.tuples(kinds, sets), min_size=1, max_size=6))
    found = [says(f"w{i}", *loaded, kind=kind) for i, (kind, loaded) in enumerate(workers)]
    there = {kind: sum(w.kind == kind for w in found) for kind in ("cpu", "gpu")}
    targets = {k: draw(st.integers(0, n)) for k, n in there.items() if n}
    slots = [
        slot(*sorted(draw(sets)), kind=kind)
        for kind, count in targets.items()
        for _ in range(draw(st.integers(0, count)))
    ]
    return named(*found), targets, slots


@pytest.mark.slow
@given(falls(), st.randoms(use_true_random=False))
def test_whoever_goes_every_model_that_had_a_worker_keeps_one(fall, random):
    workers, targets, slots = fall
    leaving = Leaving(MODELS)
    wanted = {MODELS[v] for one in slots for v in one.variants}
    for _ in range(8):
        leaving.look(targets, workers, slots, roomy)
        before = {MODELS[v] for w in workers.values() for v in w.loaded} & wanted
        for kind in targets:
            its = [w for w, s in workers.items() if s.kind == kind]
            for worker in random.sample(its, max(len(its) - leaving.least.get(kind, len(its)), 0)):
                del workers[worker]
        after = {MODELS[v] for w in workers.values() for v in w.loaded}
        assert before <= after
        # Those that stay load what the plan has for them, beside what they have; then spares.
        left = {kind: [one for one in slots if one.kind == kind] for kind in targets}
        for worker, s in staying(targets, workers).items():
            if left.get(s.kind):
                more = frozenset(left[s.kind].pop(0).variants)
                workers[worker] = s._replace(loaded=s.loaded | more)
        leaving.look(targets, workers, slots, roomy)
        for worker, one in leaving.also({w: Wanted((), ()) for w in workers}).items():
            s = workers[worker]
            workers[worker] = s._replace(loaded=s.loaded | frozenset(one.keep))
    there = {kind: sum(s.kind == kind for s in workers.values()) for kind in targets}
    assert all(n <= targets[kind] for kind, n in there.items()) or not any(targets.values())
