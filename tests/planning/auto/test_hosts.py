"""Which requests may wait for batches of which other models."""

import pytest

from ray_slo.planning.auto.graph import Config
from ray_slo.planning.auto.hosts import may_wait
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
