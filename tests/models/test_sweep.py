"""The order of a warm-up sweep, in virtual time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_slo.core.profiles import doubling_sizes
from ray_slo.models.profiling import to_profile
from ray_slo.models.sweep import Sweep


def run(sweep: Sweep, seconds) -> list[int]:
    """The sizes that were timed; `seconds(size)` is what a call takes."""
    calls = []
    while (size := sweep.size) is not None:
        calls.append(size)
        sweep.took(seconds(size))
    return calls


def test_a_quick_network_is_measured_at_its_largest_size_first():
    sweep = Sweep(doubling_sizes(64), budget_s=3, repeats=2)
    calls = run(sweep, lambda size: 0.001 * size + 0.004)
    assert calls == [1, 1, 64, 64, 2, 4, 8, 16, 32, *doubling_sizes(64) * 2]
    assert {size: len(taken) for size, taken in sweep.samples.items()} == dict.fromkeys(
        doubling_sizes(64), 2
    )


def test_a_slow_network_is_measured_at_a_second_size_though_that_exceeds_the_budget():
    sweep = Sweep((1, 2, 4, 8), budget_s=3, bound_s=30)
    assert run(sweep, lambda size: 1.4 * size) == [1, 2]
    profile = to_profile(sweep.samples, max_batch_size=8)
    assert profile.latency(8) == pytest.approx(11.2)
    assert profile.measured_to == 2


def test_no_second_size_that_takes_longer_than_the_whole_budget():
    sweep = Sweep((1, 2, 4), budget_s=1, bound_s=30)
    assert run(sweep, lambda size: 0.6 * size) == [1]
    table = to_profile(sweep.samples, max_batch_size=4).table
    assert table == pytest.approx([0.6, 1.2, 1.8, 2.4])


def test_the_first_size_over_the_bound_is_the_last():
    sweep = Sweep(doubling_sizes(64), budget_s=60, bound_s=0.02, repeats=1)
    run(sweep, lambda size: 0.01 + 0.001 * size)
    assert list(sweep.samples) == [1, 2, 4, 8, 16]


def test_a_first_call_that_compiles_does_not_end_the_sweep():
    seen = set()

    def seconds(size):
        first, _ = size not in seen, seen.add(size)
        return 0.001 * size + (0.5 if first else 0.0)

    sweep = Sweep(doubling_sizes(16), budget_s=10, bound_s=0.1, repeats=3)
    run(sweep, seconds)
    assert list(sweep.samples) == doubling_sizes(16)
    for size, taken in sweep.samples.items():
        assert taken == pytest.approx([0.001 * size] * 3)


def test_while_others_wait_no_call_is_long_but_of_one_item():
    sweep = Sweep(doubling_sizes(32), budget_s=10, call_s=0.05, repeats=1)
    calls = run(sweep, lambda size: 0.06 + 0.001 * size)
    assert set(calls) == {1}
    sweep = Sweep(doubling_sizes(32), budget_s=10, call_s=0.05, repeats=1)
    calls = run(sweep, lambda size: 0.002 * size)
    assert max(calls) == 16


def test_times_are_steady_when_the_last_three_rounds_differ_little():
    """Ray's own start makes the first 0.4 s twice as slow."""
    spent_s = 0.0

    def seconds(size):
        nonlocal spent_s
        took_s = 0.01 * size * (2.0 if spent_s < 0.4 else 1.0)
        spent_s += took_s
        return took_s

    sweep = Sweep((1, 2, 4), budget_s=3)
    before = []
    while sweep.steady is None:
        before.append(sweep.spread)
        sweep.took(seconds(sweep.size))
    assert min(before) == pytest.approx(2.0)
    assert sweep.steady == {size: pytest.approx([0.01 * size] * 3) for size in (1, 2, 4)}
    assert sweep.outcome == "times are steady"
    assert max(sweep.samples[4]) == pytest.approx(0.08)  # disturbed ones are among all
    assert spent_s < 1.0


def test_times_that_differ_are_not_steady():
    times = itertools.cycle([0.01, 0.013])
    sweep = Sweep((1,), budget_s=1)
    run(sweep, lambda size: next(times))
    assert sweep.steady is None and sweep.spread == pytest.approx(1.3)
    assert "not steady, the longest is 1.3 times the shortest" in sweep.outcome
    assert "no time" in Sweep((1,), budget_s=1).outcome


@given(
    st.floats(1e-4, 3.0),
    st.floats(0.0, 3.0),
    st.integers(1, 128),
    st.floats(0.01, 20.0),
    st.none() | st.floats(0.01, 20.0),
)
def test_any_sweep_ends_about_when_it_should_and_errs_on_the_slow_side(
    each_s, fixed_s, largest, budget_s, bound_s
):
    def seconds(size):
        return fixed_s + each_s * size

    sweep = Sweep(doubling_sizes(largest), budget_s=budget_s, bound_s=bound_s)
    calls = run(sweep, seconds)
    # One call is never cut short, a second size may take the budget again.
    assert sum(map(seconds, calls)) <= 2 * budget_s + seconds(1) + 1e-9
    assert calls[0] == 1
    profile = to_profile(sweep.samples, max_batch_size=largest)
    for size in range(1, largest + 1):
        assert profile(size) >= seconds(size) * (1 - 1e-9)


def test_sizes_are_checked():
    for sizes in ((), (0, 1)):
        with pytest.raises(ValueError, match="at least one number ≥ 1"):
            Sweep(sizes, budget_s=1)
