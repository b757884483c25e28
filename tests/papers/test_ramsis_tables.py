import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from ray_slo.core.profiles import LatencyProfile
from ray_slo.papers.ramsis import (
    DROP,
    PolicySet,
    Problem,
    Table,
    profile_hash,
    solve,
    solve_set,
)
from ray_slo.papers.ramsis.table import FORMAT

VARIANTS = (
    ("fast", 60.0, LatencyProfile.linear(0.006, 0.012, 8)),
    ("slow", 81.0, LatencyProfile.linear(0.030, 0.050, 8)),
)
PROBLEM = Problem(VARIANTS, slo_s=0.15, rate=60, num_workers=3, num_slacks=30)


@pytest.fixture(scope="module")
def tables():
    return solve_set(PROBLEM, low=10, high=250, step_accuracy=2.0)


def test_lookup():
    table = solve(PROBLEM.at_rate(1))
    assert table.max_queue == 8  # no variant takes more
    assert table.lookup(1, 0.15) == ("slow", 1)
    assert table.lookup(3, 0.15) == ("slow", 3)  # 140 ms
    assert table.lookup(3, 0.139) == ("fast", 3)
    assert table.lookup(4, 0.15) == ("fast", 4)
    # More than the SLO is the SLO; late ones go to the fastest variant, all at once.
    assert table.lookup(1, 99.0) == table.lookup(1, 0.15)
    assert table.lookup(5, 0.001) == table.lookup(5, -1.0) == ("fast", 5)
    # The full queue: N of them, as if late.
    assert table.lookup(9, 0.15) == table.lookup(1000, 0.15) == ("fast", 8)


def test_a_slot_stands_for_the_slacks_above_it():
    table = solve(PROBLEM)
    for j, slack in enumerate(table.slacks_s):
        expected = (table.names[table.variant[1, j]], 2)
        assert table.lookup(2, float(slack)) == expected
        if j + 1 < len(table.slacks_s):
            assert table.lookup(2, float(table.slacks_s[j + 1]) - 1e-6) == expected


def test_never_answers_late_what_can_be_in_time():
    table = solve(PROBLEM.at_rate(200))
    for n in range(1, 9):
        for slack in np.linspace(0.0, 0.15, 31):
            name, size = table.lookup(n, float(slack))
            profile = {v[0]: v[2] for v in VARIANTS}[name]
            if VARIANTS[0][2].latency(n) <= slack:
                assert size == n
                assert profile.latency(n) <= slack + 1e-9


def test_drops_what_nothing_can_answer_in_time():
    table = solve(replace(PROBLEM, late="drop", rate=200))
    assert table.lookup(3, 0.001) == (DROP, 1)
    # 3 in 30 ms: not even "fast", but it can do two of them.
    assert table.lookup(3, 0.025)[1] <= 2
    assert table.lookup(1, 0.15)[0] in ("fast", "slow")
    assert table.violation_rate < solve(PROBLEM.at_rate(200)).violation_rate


def test_covering_is_the_lowest_load_above(tables):
    low, *_, high = tables.rates
    assert (low, high) == (10, 250)
    for a, b in zip(tables.rates[:-1], tables.rates[1:], strict=True):
        assert tables.covering(a).rate == a
        assert tables.covering((a + b) / 2).rate == b
        assert tables.covering(a * (1 + 1e-12)).rate == a
    assert tables.covering(0.1).rate == low
    assert tables.covering(9999).rate == high


def test_adjacent_tables_are_close(tables):
    accuracies = [t.expected_accuracy for t in tables]
    assert max(abs(np.diff(accuracies))) <= 2.0
    assert len(tables) <= 4 * (accuracies[0] - accuracies[-1]) / 2.0


def test_solves_only_what_is_missing(tables):
    solved = []
    finer = solve_set(
        PROBLEM, [33.0], low=10, high=300, step_accuracy=2.0,
        existing=tables, progress=lambda t: solved.append(t.rate),
    )  # fmt: skip
    assert set(finer.rates) == set(tables.rates) | set(solved)
    assert not set(tables.rates) & set(solved)
    assert {33.0, 300.0} <= set(solved)


def test_problems_can_be_solved_elsewhere(tables):
    with ThreadPoolExecutor(2) as pool:
        other = solve_set(PROBLEM, low=10, high=250, step_accuracy=2.0, mapper=pool.map)
    assert other.rates == tables.rates
    assert all(np.array_equal(a.variant, b.variant) for a, b in zip(other, tables, strict=True))


def test_by_default_up_to_capacity():
    found = solve_set(PROBLEM, step_accuracy=30)
    assert found.rates[0] == pytest.approx(0.05 * PROBLEM.capacity)
    assert found.rates[-1] == pytest.approx(PROBLEM.capacity)


def test_saved_and_read_again(tables, tmp_path):
    path = tmp_path / "set.npz"
    tables.save(path)
    again = PolicySet.load(path)
    assert again.profile_hash == profile_hash(VARIANTS)
    assert again.rates == tables.rates
    assert again.options == tables.options == PROBLEM.options()
    for a, b in zip(again, tables, strict=True):
        assert (a.names, a.accuracies, a.profile_hash) == (b.names, b.accuracies, b.profile_hash)
        assert a.expected_accuracy == b.expected_accuracy
        assert a.violation_rate == b.violation_rate
        assert np.array_equal(a.variant, b.variant)
        assert np.array_equal(a.batch, b.batch)
        assert a.variant_mix == pytest.approx(b.variant_mix, abs=1e-5)
        assert a.lookup(2, 0.1) == b.lookup(2, 0.1)
    assert path.stat().st_size < 3000 * len(tables)


def test_one_table_saved_and_read_again(tmp_path):
    table = solve(PROBLEM)
    table.save(tmp_path / "one")
    again = Table.load(tmp_path / "one")
    assert (again.rate, again.num_workers, again.slo_s) == (60, 3, 0.15)
    assert again.profile_hash == PROBLEM.profile_hash
    assert again.lookup(2, 0.15) == table.lookup(2, 0.15)


def test_refuses_files_that_do_not_fit(tables, tmp_path):
    path = tmp_path / "set.npz"
    tables.save(path)
    with pytest.raises(ValueError, match=r"holds .* tables; read it with PolicySet"):
        Table.load(path)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="not a file of RAMSIS tables"):
        PolicySet.load(tmp_path / "text")
    with (tmp_path / "old.npz").open("wb") as file:
        np.savez(file, header=np.array(json.dumps({"format": "other/9"})))
    with pytest.raises(ValueError, match=f"format must be '{FORMAT}', got 'other/9'"):
        PolicySet.load(tmp_path / "old.npz")
    with pytest.raises(FileNotFoundError):
        PolicySet.load(tmp_path / "none.npz")


def test_sets_are_of_one_problem(tables):
    with pytest.raises(ValueError, match="at least one table"):
        PolicySet(())
    with pytest.raises(ValueError, match="two tables for 60 requests"):
        PolicySet((solve(PROBLEM), solve(PROBLEM)))
    other = replace(PROBLEM, num_workers=4, rate=70)
    with pytest.raises(ValueError, match="same profiles and options"):
        PolicySet((solve(PROBLEM), solve(other)))
    with pytest.raises(ValueError, match="existing: solved for other"):
        solve_set(other, [70.0], existing=tables)


def test_a_range_may_be_below_one_request_per_second():
    found = solve_set(PROBLEM, low=0.2, high=0.5, step_accuracy=50)
    assert [table.rate for table in found] == [0.2, 0.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"low": 5.0}, "low and high must be rates with 0 < low < high, got 5.0 and None"),
        ({"low": 5.0, "high": 4.0}, "got 5.0 and 4.0"),
        ({"low": 0.0, "high": 4.0}, "got 0.0 and 4.0"),
        ({"rates": [5.0], "step_accuracy": 0}, "step_accuracy must be positive, got 0"),
    ],
)
def test_bad_loads_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        solve_set(PROBLEM, **arguments)


def test_arrays_that_do_not_fit_their_header_are_named(tables, tmp_path):
    path = tmp_path / "set.npz"
    tables.save(path)
    with np.load(path) as file:
        arrays = dict(file)
    with path.open("wb") as file:
        np.savez(file, **arrays | {"variant": arrays["variant"] + len(VARIANTS)})
    with pytest.raises(ValueError, match="variant"):
        PolicySet.load(path)
