import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_slo.planning import Infeasible, autoscale
from ray_slo.planning.autoscale import Limits, Plan, Problem, Signals, State


def advise(workers, bad_rate=0.0, idle_fraction=0.0, state=State(), **limits):
    limits = {"min_workers": 0, "max_workers": 1000, "periods_down": 1} | limits
    return autoscale.plan(
        Problem(Signals(workers, bad_rate, idle_fraction), Limits(**limits), state)
    )


@given(st.integers(1, 400), st.floats(1.02, 2.5))
def test_a_flat_top_is_scaled_to_its_load_in_one_step(workers, overload):
    """Load of N·overload workers at goodput N: r = 1 − 1/overload (§3.5)."""
    plan = advise(workers, bad_rate=1 - 1 / overload)
    assert isinstance(plan, Plan)
    assert workers * overload <= plan.workers + 1e-6
    assert plan.workers <= max(workers * overload + 1, workers + 1)


@given(st.integers(1, 400), st.floats(0.0, 0.999))
def test_what_is_busy_stays(workers, idle):
    plan = advise(workers, idle_fraction=idle, idle_above=0.0)
    assert isinstance(plan, Plan)
    busy = workers * (1 - idle)
    assert busy <= plan.workers + 1e-6 < busy + 1 + 1e-5


def test_published_figures_and_reasons():
    plan = advise(8, bad_rate=0.2)
    assert (plan.workers, plan.explanation) == (
        10,
        "20.0% bad with 8 workers: the load is that of 10; 2 more.",
    )
    plan = advise(8, idle_fraction=0.3)
    assert (plan.workers, plan.explanation) == (
        6,
        "30% idle with 8 workers: 5.6 are busy; 2 fewer.",
    )
    assert advise(8, bad_rate=0.01, idle_fraction=0.1).explanation == (
        "1.0% bad and 10% idle are within the limits; no change."
    )


def test_bad_and_idle_at_once_adds_and_says_so():
    plan = advise(4, bad_rate=0.5, idle_fraction=0.5)
    assert plan.workers == 8
    assert "though 50% of their time is idle" in plan.explanation


def test_a_share_to_keep_idle():
    assert advise(100, idle_fraction=0.5, idle_above=0.2, keep_idle=0.2).workers == 63  # 50 / 0.8
    assert advise(2, idle_fraction=0.4).workers == 2  # 1.2 are busy


def test_removing_waits_for_periods_in_a_row_and_takes_the_least_of_them():
    state, targets = State(), []
    for idle in (0.5, 0.2, 0.6):
        plan = advise(10, idle_fraction=idle, state=state, periods_down=3)
        state, targets = plan.state, [*targets, plan.workers]
    assert targets == [10, 10, 8]  # the second period had 8 busy
    assert state == State()


def test_a_period_without_wish_starts_the_count_again():
    first = advise(10, idle_fraction=0.5, periods_down=2)
    assert "period 1 of 2" in first.explanation
    quiet = advise(10, state=first.state, periods_down=2)
    assert quiet.state == State()
    assert advise(10, idle_fraction=0.5, state=quiet.state, periods_down=2).workers == 10
    up = advise(10, bad_rate=0.5, state=first.state, periods_up=2)
    assert (up.workers, up.state.streak) == (10, 1)
    assert advise(10, bad_rate=0.5, state=up.state, periods_up=2).workers == 20


def test_the_range_holds_and_too_much_load_is_infeasible():
    assert advise(4, idle_fraction=1.0, min_workers=2).workers == 2
    assert "min_workers is 2" in advise(4, idle_fraction=1.0, min_workers=2).explanation
    assert advise(0, min_workers=3).workers == 3
    refused = advise(8, bad_rate=0.5, max_workers=12)
    assert isinstance(refused, Infeasible)
    assert refused.reason == "the load needs 16 workers, max_workers is 12"
    assert refused.best_effort.workers == 12
    assert advise(8, bad_rate=1.0, max_workers=12).workers == 12
    assert "nothing was served" in advise(8, bad_rate=1.0, max_workers=12).explanation
    assert "max_workers is 12; 8 fewer" in advise(20, max_workers=12).explanation


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_never_leaves_the_range_and_never_moves_without_a_signal(periods, up, down):
    workers, state = 5, State()
    for bad, idle in periods:
        advice = advise(
            workers, bad, idle, state, min_workers=2, max_workers=9, periods_up=up,
            periods_down=down,
        )  # fmt: skip
        plan = advice if isinstance(advice, Plan) else advice.best_effort
        assert 2 <= plan.workers <= 9
        if plan.workers > workers:
            assert bad > 0.01
        if plan.workers < workers:
            assert bad <= 0.01 < 0.1 < idle
        workers, state = plan.workers, plan.state


def test_constant_load_settles():
    """Busy work of 5.3 workers: from any number of workers it ends at 6, and stays."""
    for workers in (1, 3, 6, 20):
        state = State()
        for _ in range(20):
            r, f = max(0.0, 1 - workers / 5.3), max(0.0, 1 - 5.3 / workers)
            plan = advise(workers, r, f, state, periods_down=2)
            assert isinstance(plan, Plan)
            workers, state = plan.workers, plan.state
        assert workers == 6


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Signals(-1, 0, 0), "workers must be at least 0"),
        (lambda: Signals(1, 1.5, 0), "bad_rate must be from 0 to 1, got 1.5"),
        (lambda: Limits(5, 4), "min_workers must lie between 0 and max_workers, got 5 and 4"),
        (lambda: Limits(1, 4, idle_above=1), "idle_above must be at least 0 and below 1"),
        (lambda: Limits(1, 4, keep_idle=0.2), "keep_idle must lie between 0 and idle_above"),
        (lambda: Limits(1, 4, periods_up=0), "periods_up must be at least 1"),
    ],
)
def test_mistakes_name_the_field(build, says):
    with pytest.raises(ValueError, match=says):
        build()


def test_the_worked_example_of_the_module():
    assert doctest.testmod(autoscale).failed == 0
