"""Planned slots are assigned to workers with the fewest possible swaps."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_slo.core.cluster import Assigned
from ray_slo.planning.auto import Slot, place


def slot(*names, kind="gpu", load=10.0):
    return Slot(kind, tuple(Assigned(name, 4, load) for name in names), names)


def swaps(placed, there):
    """The number of variants to load on workers that have other variants."""
    return sum(
        len(set(slot.variants) - set(there[worker][1]))
        for worker, slot in placed.items()
        if there[worker][1]
    )


def test_kinds_do_not_mix():
    there = {"c0": ("cpu", []), "g0": ("gpu", []), "g1": ("gpu", ["a"])}
    placed = place([slot("a"), slot("b", kind="cpu")], there)
    assert placed == {"c0": slot("b", kind="cpu"), "g1": slot("a")}
    assert swaps(placed, there) == 0


def test_the_first_of_equal_workers_is_taken():
    there = {f"g{i}": ("gpu", []) for i in range(5)}
    assert list(place([slot("a"), slot("b")], there)) == ["g0", "g1"]


def test_fewer_workers_cover_all_variants_alike():
    wanted = [slot("a"), slot("a"), slot("a"), slot("b"), slot("c", load=5.0)]
    placed = place(wanted, {f"g{i}": ("gpu", []) for i in range(3)})
    assert {s.variants for s in placed.values()} == {("a",), ("b",), ("c",)}
    assert place(wanted, {}) == {}


names = st.sets(st.sampled_from("abcd"), max_size=3)


@given(st.lists(names, min_size=1, max_size=4), st.lists(names, min_size=1, max_size=4))
def test_no_assignment_has_fewer_swaps(wanted, loaded):
    slots = [slot(*sorted(variants)) for variants in wanted if variants][: len(loaded)]
    there = {f"g{i}": ("gpu", sorted(variants)) for i, variants in enumerate(loaded)}
    placed = place(slots, there)
    assert sorted(s.variants for s in placed.values()) == sorted(s.variants for s in slots)
    least = min(
        swaps(dict(zip(order, slots, strict=False)), there)
        for order in permutations(there, len(slots))
    )
    assert swaps(placed, there) == least


@pytest.mark.parametrize("seed", range(5))
def test_what_is_placed_stays(seed):
    rng = np.random.default_rng(seed)
    slots = [slot(*sorted(rng.choice(list("abcdef"), 2, replace=False))) for _ in range(8)]
    first = place(slots, {f"g{i}": ("gpu", []) for i in range(10)})
    loaded = {worker: placed.variants for worker, placed in first.items()}
    there = {f"g{i}": ("gpu", loaded.get(f"g{i}", ())) for i in range(10)}
    assert swaps(place(slots, there), there) == 0
