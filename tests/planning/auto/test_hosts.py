"""Which requests may wait for batches of which other models."""

from collections import Counter
from types import SimpleNamespace

import pytest

from ray_slo.planning.auto.graph import Config
from ray_slo.planning.auto.hosts import apart, may_wait
from ray_slo.planning.auto.limits import Room
from ray_slo.planning.auto.problem import Kind
from ray_slo.planning.auto.uses import Use


def use(name, busy, latency_s, wait_s):
    config = Config(name, "k", 8, latency_s, 8 / latency_s, 2 * latency_s)
    return Use(config, busy * config.throughput, 1.0, (("s", "t"),), wait_s)


@pytest.mark.parametrize(
    ("made", "fine"),
    [
        ([{"slow": 1.0}, {"quick": 1.0}], True),
        ([{"slow": 1.0, "quick": 0.1}], False),  # no worker where it does not wait
        ([{"slow": 0.5, "quick": 0.1}, {"quick": 1.0}], True),  # 0.1 · 0.3 s wait, 0.1 s may
        ([{"slow": 0.3, "quick": 0.6}, {"quick": 1.0}], False),  # 0.6 · 0.3 s
        ([{"slow": 0.3, "quick": 0.6}, {"quick": 1.0}, {"quick": 1.0}], True),  # 2 · 0.1 s may
    ],
)
def test_what_waits_behind_long_batches_is_served_by_the_other_workers(made, fine):
    busy = {name: sum(shares.get(name, 0.0) for shares in made) for name in ("slow", "quick")}
    uses = [use("slow", busy["slow"], 0.3, 0.4), use("quick", busy["quick"], 0.1, 0.1)]
    assert may_wait(uses, made) is fine


@pytest.mark.parametrize(
    ("least", "most", "counts"),
    [
        (0, 9, {"a": 2, "b": 1}),  # as many as they need
        (4, 9, {"a": 3, "b": 1}),  # 1.8 / 2 is more than 0.5
        (7, 9, {"a": 5, "b": 2}),  # a, a, b, a: 1.8 / 4 is less than 0.5, but more than 0.5 / 2
        (7, 5, {"a": 4, "b": 1}),
    ],
)
def test_surplus_workers_go_where_the_load_is_highest(least, most, counts):
    kind = Kind("k", least, 9)
    program = SimpleNamespace(
        problem=SimpleNamespace(present=None), room=lambda variant, kind: Room()
    )
    uses = [use("a", 1.8, 0.1, 0.2), use("b", 0.5, 0.1, 0.2)]
    slots = apart(program, kind, uses, most)
    parts = [part for slot in slots for part in slot.parts]
    assert Counter(part.variant for part in parts) == counts
    for part in parts:
        share = {"a": 1.8, "b": 0.5}[part.variant] / counts[part.variant]
        assert (part.batch_size, part.load) == (8, pytest.approx(share * 80))
    assert apart(program, kind, [], most) == []
