"""The part of `live-variants` that needs no Ray: what the simulator makes of what was measured."""

import numpy as np
import pandas as pd
import pytest

from benchmarks.live.variants import Measured, execution, predict, throughput
from ray_slo.core import LatencyProfile

TOLD = {
    "quick": LatencyProfile.linear(0.002, 0.010, 8),
    "deep": LatencyProfile.linear(0.020, 0.100, 8),
}
ACCURACY = {"quick": 70.0, "deep": 90.0}


def ran(variant, size, seconds):
    """The rows of one batch: one per request."""
    return [{"variant": variant, "batch_size": float(size), "exec_s": seconds}] * size


def frame(batches):
    return pd.DataFrame([row for batch in batches for row in ran(*batch)])


def test_execution_times_are_those_of_batches_and_not_of_requests():
    quick, deep = TOLD["quick"], TOLD["deep"]
    batches = [("quick", 1, 0.5 * quick.latency(1))] * 3 + [("quick", 8, 2.0 * quick.latency(8))]
    actual, spread = execution(frame(batches), TOLD)
    assert actual["quick"].latency(1) == pytest.approx(0.5 * quick.latency(1))
    assert actual["deep"] is deep
    assert spread == pytest.approx(np.std(np.log([1, 1, 1, 4])))


def measured(rate):
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1 / rate, int(rate * 20)))
    empty = pd.DataFrame({"variant": [], "batch_size": [], "exec_s": []})
    return Measured(empty, empty, TOLD, 0.002, times)


@pytest.mark.parametrize("policy", ["price", "deferred"])
def test_prediction_follows_the_load(policy):
    calm, in_time = predict(policy, ACCURACY, measured(4), 2.0, 20.0), 1.0
    busy = predict(policy, ACCURACY, measured(90), 2.0, 20.0)
    assert calm[1] < in_time and busy[1] < in_time
    if policy == "price":
        assert calm[0] > 85 > busy[0] > 70
    else:  # the first variant, whatever the load
        assert calm[0] == busy[0] == 70


def test_throughput_leaves_time_to_wait():
    assert throughput(TOLD["deep"], 0.4) == pytest.approx(5 / 0.2)


def test_figures_of_a_run():
    requests = pd.DataFrame(
        {
            "status": ["ok", "ok", "late", "refused"],
            "accuracy": [90.0, 70.0, 90.0, None],
            "correct": pd.array([True, False, True, None], dtype="boolean"),
        }
    )
    seen = Measured(requests, requests, TOLD, 0.0)
    assert (seen.violations, seen.accuracy, seen.right) == (50.0, 80.0, 50.0)
