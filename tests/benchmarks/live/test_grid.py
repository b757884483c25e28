"""The part of `live-grid` that needs no Ray: cells in slow motion, simulated, and compared."""

import pytest

from benchmarks.live.grid import CELLS, SYSTEMS, Slowed, application, compared, simulated


@pytest.mark.parametrize("of", CELLS, ids=str)
def test_a_cell_in_slow_motion_has_tens_of_requests_per_second(of):
    slowed = Slowed.made(*of, 10.0, 5.0)
    total = sum(map(len, slowed.arrivals.values()))
    assert 20 < total / slowed.duration_s < 100
    assert 0 < slowed.counted < total
    assert max(at for times in slowed.arrivals.values() for at in times) < slowed.duration_s
    assert slowed.workers <= 4
    for model in slowed.of.models:
        assert slowed.slos_s[model.name] == pytest.approx(of[2] * model.latency_slo_s)
        assert slowed.tables[model.name][0] < slowed.slos_s[model.name]


def test_the_simulator_serves_less_with_a_longer_way():
    slowed = Slowed.made(*CELLS[0], 10.0, 5.0)
    near, far = (simulated(slowed, *SYSTEMS["deferred"], delay_s) for delay_s in (0.0, 0.3))
    assert slowed.counted >= near > far > 0


def test_pairs_that_are_far_apart_are_to_be_in_order():
    slowed = Slowed.made(*CELLS[0], 10.0, 5.0)
    n = slowed.counted
    goods = {"a": (n - 10, n), "b": (n - 9, n // 2), "c": (n - 8, n // 2 + 1)}
    rows = compared(slowed, goods)
    off = {row.case.rpartition(" · ")[2]: row.ours for row in rows if "off" in row.metric}
    assert off["a"] == pytest.approx(100 * 10 / n)
    assert rows[-1].ours == 2  # a is behind b and c live; these two are as good as equal


def test_every_system_can_be_deployed(tmp_path):
    slowed = Slowed.made(*CELLS[1], 10.0, 5.0)
    for policy, kwargs in SYSTEMS.values():
        assert application(slowed, policy, kwargs, tmp_path) is not None
