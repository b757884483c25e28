from collections import Counter
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.core import Assigned
from ray_slo.planning.loki import Assignment, Plan
from ray_slo.planning.placement import place

VARIANTS = ("a", "b", "c")


def plan(*assignments):
    """(task, variant, batch size, workers, load) each."""
    made = tuple(Assignment(t, v, b, n, load, 100.0, 0.01) for t, v, b, n, load in assignments)
    return Plan("hardware", made, (), 90.0, 100.0, 0.0, 0, 0.0, "")


def swaps(placed, workers):
    """Reloaded workers, and workers that load something."""
    loads = [w for w, assigned in placed.items() if workers[w] != assigned.variant]
    return sum(workers[w] is not None for w in loads), len(loads)


wanted = st.lists(
    st.tuples(st.sampled_from(VARIANTS), st.integers(1, 2), st.integers(1, 3)),
    max_size=3,
    unique_by=lambda a: a[:2],
)
loaded = st.lists(st.sampled_from((None, *VARIANTS)), min_size=1, max_size=5)


@settings(max_examples=200)
@given(wanted, loaded)
def test_fewest_swaps_of_all_placements(wanted, loaded):
    workers = {f"w{i}": variant for i, variant in enumerate(loaded)}
    made = plan(*(("t", v, b, n, 10.0 * n) for v, b, n in wanted))
    placed = place(made, workers)
    slots = [(v, b) for v, b, n in wanted for _ in range(n)]
    assert len(placed) == min(len(slots), len(workers))
    counts = Counter((a.variant, a.batch_size) for a in placed.values())
    assert not counts - Counter(slots)
    # Every way to give the chosen slots to workers.
    chosen = list(counts.elements())
    best = min(
        swaps({w: Assigned(*slot) for w, slot in zip(order, chosen, strict=True)}, workers)
        for order in permutations(workers, len(chosen))
    )
    assert swaps(placed, workers) == best


def test_a_batch_size_is_no_swap_and_the_load_is_per_worker():
    made = plan(("t", "a", 4, 2, 60.0))
    assert place(made, {"x": "a", "y": "a"}) == {
        "x": Assigned("a", 4, 30.0),
        "y": Assigned("a", 4, 30.0),
    }


def test_extra_workers_are_left_out():
    assert place(plan(("t", "a", 1, 1, 5.0)), {"x": None, "y": "a", "z": "b"}) == {
        "y": Assigned("a", 1, 5.0)
    }


def test_missing_workers_every_task_gets_its_share():
    # Of four workers for three: one detector and two of the recognisers, the busier one first.
    made = plan(("d", "a", 1, 1, 10.0), ("r", "b", 1, 2, 40.0), ("r", "c", 1, 1, 60.0))
    two = place(made, {"x": "b", "y": None})
    assert {w: a.variant for w, a in two.items()} == {"x": "c", "y": "a"}
    three = place(made, {"x": "b", "y": None, "z": None})
    assert {w: a.variant for w, a in three.items()} == {"x": "b", "y": "a", "z": "c"}
    assert place(made, {}) == {}
