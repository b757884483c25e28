"""The part of `truth` that needs no Ray: applications, what the simulator says of them, rows."""

import numpy as np
import pytest

from benchmarks.live.grid import Answered
from benchmarks.live.truth import APPLICATIONS, Figures, compared, known
from ray_slo.core import LatencyProfile
from ray_slo.planning.brains.auto import AutoBrain
from ray_slo.serve.config.resolve import parse_spec


@pytest.mark.parametrize("name", APPLICATIONS)
def test_every_application_is_a_config_and_is_simulated(name, tmp_path):
    application = APPLICATIONS[name]
    spec = parse_spec(application.config(tmp_path))
    assert sum(w.num_replicas for w in spec.workers.values()) == sum(
        count for count, _ in application.workers.values()
    )
    arrivals = application.arrivals(8.0, 0)
    assert set(arrivals) == set(application.rates) and all(arrivals.values())
    said = application.simulated(arrivals, 8.0, {}, 0.005, 0.02)
    assert said.offered == pytest.approx(sum(map(len, arrivals.values())) / 8.0)
    assert 0 < said.goodput <= said.offered
    assert (said.goodput / said.offered < 0.8) == (name == "overload")
    assert 0 < said.busy <= sum(count for count, _ in application.workers.values())
    assert 0 < said.ms(50) <= said.ms(99) <= 1.1e3 * max(application.slos_s.values())


def test_the_simulator_goes_by_what_it_is_told_and_by_how_long_nets_sleep():
    application = APPLICATIONS["one model"]
    arrivals = application.arrivals(8.0, 0)
    slow = {"net@cpu": LatencyProfile.linear(0.1, 0.5, 32)}  # believed: batches are late if large
    wary = application.simulated(arrivals, 8.0, slow, 0.0, 0.0)
    right = application.simulated(arrivals, 8.0, {}, 0.0, 0.0)
    late = application.simulated(arrivals, 8.0, {}, 0.3, 0.0)
    assert wary.goodput < right.goodput > late.goodput


def test_a_pipeline_is_simulated_with_its_live_planner():
    application = APPLICATIONS["pipeline"]
    assert isinstance(application._brain(application._problem({})), AutoBrain)


def test_what_schedulers_know_is_found_in_groups_too():
    one, two = LatencyProfile.linear(0.01, 0.1, 4), LatencyProfile.linear(0.02, 0.1, 4)
    status = {
        "profiles": {"a@cpu": one.to_json()},
        "groups": {"g": {"profiles": {"b@cpu": two.to_json()}}, "h": {}},
    }
    found = {name: profile.hash for name, profile in known(status).items()}
    assert found == {"a@cpu": one.hash, "b@cpu": two.hash}


def test_figures_are_compared():
    answers = [
        *(Answered(0.1 * i, "m", True, i < 8, 0.1 * (i + 1), 90.0) for i in range(10)),
        Answered(1.0, "m", False, False, 0.0),
    ]
    live = Figures.seen(answers, 2.0, 1.5)
    assert (live.goodput, live.offered, live.accuracy) == (4.0, 5.5, 90.0)
    assert len(live.latencies_s) == 10
    said = Figures(5.0, 5.5, 90.0, np.array([1.0]), 1.4)
    rows = {(row.case, row.metric): row.ours for row in compared("x", live, said, None, 7, 0)}
    case = "live against simulated · x"
    assert rows[case, "goodput, live off simulated"] == pytest.approx(100 / 5.5)
    assert rows[case, "p99, live off simulated"] == pytest.approx(abs(live.ms(99) / 1e3 - 1) * 100)
    assert rows[case, "decisions"] == 7 and ("x · replayed", "p50") not in rows
