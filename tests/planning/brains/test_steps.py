"""Steps from the present assignment to a plan's: in between, every model keeps a worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_slo.core import Assigned
from ray_slo.planning.auto import Slot
from ray_slo.planning.brains.brain import WorkerSays
from ray_slo.planning.brains.steps import Steps

VARIANTS = [f"{model}{i}" for model in "abc" for i in (0, 1)]
MODELS = {variant: variant[0] for variant in VARIANTS}


def two_fit(variants, kind):
    return len(variants) <= 2


def slot(*variants):
    return Slot("cpu", tuple(Assigned(v, 1) for v in variants), variants)


def says(worker, *loaded):
    assigned = tuple(Assigned(v, 1) for v in sorted(loaded))
    return WorkerSays(worker, "cpu", frozenset(loaded), assigned)


def steps(workers, placed, starting=(), rounds=30):
    """Workers do what they are told as live ones do: load one variant a round, beside what they
    have where there is room for all that is missing. What is served after each round."""
    made, served = Steps(MODELS), []
    for number in range(rounds):
        serving = {w: s for w, s in workers.items() if number > 4 or w not in starting}
        told = made.towards(placed, workers, serving, two_fit, False)
        during, after = set(), set()
        for worker, wanted in told.items():
            loaded, keep = workers[worker].loaded, frozenset(wanted.keep)
            if not two_fit(loaded | keep, "cpu"):
                loaded &= keep
            has = loaded | frozenset([v for v in wanted.keep if v not in loaded][:1])
            assert two_fit(has, "cpu")
            now = has & keep if keep <= has else has
            workers[worker] = workers[worker]._replace(loaded=now, assigned=wanted.assigned)
            during |= {MODELS[v] for v in loaded if worker in serving}
            after |= {MODELS[v] for v in now if worker in serving}
        served += [during, after]
    return served


def test_workers_whose_policy_chooses_let_go_only_what_others_serve():
    def free(worker, *loaded):
        return says(worker, *loaded)._replace(assigned=())

    made, placed = Steps(MODELS), {"v": slot("a0", "c0"), "w": slot("b0", "c0")}

    def told(**workers):
        return made.towards(placed, workers, workers, lambda variants, kind: True, False)["v"].keep

    v = free("v", "a0", "b0", "c0")
    assert set(told(v=v, w=free("w", "c0"))) == {"a0", "b0", "c0"}
    assert set(told(v=v, w=free("w", "b0", "c0"))) == {"a0", "c0"}


def is_done(workers, placed):
    return all(set(slot.variants) <= workers[w].loaded for w, slot in placed.items())


def test_workers_let_go_in_turn_where_there_is_no_room_for_both():
    workers = {"v": says("v", "a0", "b0"), "w": says("w", "c0", "b0"), "x": says("x")}
    placed = {"v": slot("a0", "c1"), "w": slot("c1", "b1"), "x": slot("c0", "b0")}
    served = steps(workers, placed, starting=("x",))
    assert is_done(workers, placed)
    assert all(found == {"a", "b", "c"} for found in served)


def test_one_without_a_slot_helps_out():
    workers = {"v": says("v", "a0", "b0"), "w": says("w")}
    placed = {"v": slot("a0", "b1")}
    served = steps(workers, placed)
    assert is_done(workers, placed)
    assert all(found >= {"a", "b"} for found in served)


def test_where_nobody_has_room_there_is_a_gap_and_the_plan_is_carried_out():
    workers = {"v": says("v", "a0", "b0")}
    placed = {"v": slot("a0", "b1")}
    served = steps(workers, placed)
    assert is_done(workers, placed)
    assert {"a"} in served


def test_what_the_plan_does_not_serve_goes():
    workers = {"v": says("v", "a0", "b0")}
    placed = {"v": slot("a0", "c0")}
    steps(workers, placed)
    assert workers["v"].loaded == {"a0", "c0"}
    alone = {"v": says("v", "b0")}
    steps(alone, {"v": slot("a0")})
    assert alone["v"].loaded == {"a0"}


PAIRS = st.lists(st.sampled_from(VARIANTS), min_size=1, max_size=2, unique=True)


@pytest.mark.parametrize("starts", [False, True])
@given(st.lists(st.tuples(PAIRS, PAIRS), min_size=1, max_size=4))
def test_with_an_idle_worker_no_model_of_the_plan_is_ever_without_one(starts, pairs):
    workers = {f"w{i}": says(f"w{i}", *loaded) for i, (loaded, _) in enumerate(pairs)}
    placed = {f"w{i}": slot(*goal) for i, (_, goal) in enumerate(pairs)}
    workers["idle"] = says("idle")
    before = {MODELS[v] for s in workers.values() for v in s.loaded}
    needed = {MODELS[v] for one in placed.values() for v in one.variants} & before
    served = steps(workers, placed, ("idle",) if starts else (), rounds=60)
    assert all(needed <= found for found in served)
    assert is_done(workers, placed)
