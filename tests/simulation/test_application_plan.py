"""The plan of an application's document, without a run."""

from pathlib import Path

import numpy as np
import pytest

from ray_slo.core.documents import read_yaml
from ray_slo.core.trees import root_and_class
from ray_slo.simulation.application_plan import _drawn, plan_application
from ray_slo.simulation.application_spec import ApplicationSpec

DOCUMENT = {
    "workers": {"gpu": {"min_replicas": 1, "max_replicas": 4, "price_per_hour": 3}},
    "models": {
        "m": {
            "latency_slo_ms": 200,
            "variants": {
                "large": {"accuracy": 90, "profile": {"alpha_ms": 10, "beta_ms": 10}},
                "small": {"accuracy": 80, "profile": {"alpha_ms": 4, "beta_ms": 4}},
            },
        }
    },
    "objective": "cost",
}


def document(arrivals, sizes=None, **fields):
    workload = {"arrivals": arrivals} | ({} if sizes is None else {"sizes": sizes})
    return ApplicationSpec.model_validate(DOCUMENT | {"workloads": {"m": workload}} | fields)


def planned(arrivals, sizes=None, **fields):
    return plan_application(document(arrivals, sizes, **fields))


def poisson(rate):
    return {"kind": "poisson", "rate": rate}


def test_the_demand_is_the_mean_rate_and_of_a_trace_the_largest():
    assert planned(poisson(50)).problem.demand["m"].rate == 50
    trace = {"kind": "trace", "rates": [10, 80, 20]}
    assert planned(trace).problem.demand["m"].rate == 80


def test_bursts_count_and_regular_arrivals_count_as_poisson():
    regular = planned({"kind": "constant", "rate": 50})
    assert regular.problem.demand["m"].dispersion == 1
    bursty = planned({"kind": "gamma", "rate": 50, "shape": 0.1})
    assert 6 < bursty.problem.demand["m"].dispersion < 14  # 1 / shape, but for the window
    assert regular.plan.workers["gpu"] < bursty.plan.workers["gpu"]


def test_the_mean_size_of_requests_is_that_of_the_draws():
    sizes = {"kind": "measured", "values": [1, 1, 1, 3]}
    assert planned(poisson(40), sizes).problem.model["m"].items == pytest.approx(1.5, abs=0.05)
    assert planned(poisson(40)).problem.model["m"].items == 1


def test_the_draws_last_as_long_as_the_run_but_at_most_what_burstiness_keeps():
    def last_s(spec):
        return _drawn(spec.workloads["m"], 0.2, spec, np.random.default_rng(0)).arrival.max()

    assert 15 < last_s(document(poisson(50), duration_s=20)) < 20
    assert 129 < last_s(document(poisson(50), duration_s=5000)) < 130
    assert 129 < last_s(document(poisson(50))) < 130
    trace = {"kind": "trace", "rates": [50, 50], "interval_s": 150}
    assert 299 < last_s(document(trace)) < 300


def test_a_seed_gives_the_same_plan_again():
    bursty = {"kind": "gamma", "rate": 50, "shape": 0.1}
    one, same, other = (planned(bursty, seed=seed).to_json() for seed in (1, 1, 2))
    assert one == same
    assert one["demand"] != other["demand"]


def test_equal_work_is_one_row_and_shares_are_of_the_model():
    rows = planned(poisson(400)).assignments
    assert [(row["task"], row["variant"]) for row in rows] == [("m", "small"), ("m", "large")]
    assert sum(row["load"] for row in rows) == pytest.approx(400)
    for row in rows:
        assert row["share"] == pytest.approx(row["load"] / 400)


def test_what_workers_cannot_serve_is_the_shortfall():
    assert planned(poisson(50)).shortfall is None
    made = planned(poisson(1500))
    assert made.shortfall.startswith("demand 1500 req/s is out of reach with 4 gpu")
    said = made.to_json()
    assert (said["shortfall"], said["workers"], said["cost_per_hour"]) == (
        made.shortfall,
        {"gpu": 4},
        12,
    )
    assert 0.3 < said["expected"]["m"]["bad_rate"] < 0.4
    assert said["served"]["m"] == pytest.approx(0.627, abs=0.001)


def test_without_a_planner_there_is_nothing_to_plan():
    with pytest.raises(ValueError, match="planner: null runs all workers"):
        planned(poisson(50), planner=None)


def test_the_shipped_document_is_planned():
    path = Path(__file__).parents[2] / "configs" / "simulate-application.yaml"
    made = plan_application(ApplicationSpec.model_validate(read_yaml(path)), path.parent)
    assert made.shortfall is None
    roots = {root_and_class(stream)[0] for stream in made.problem.demand}
    assert roots == made.expected.keys()
