"""What shipped documents and some small ones give is what they gave when this was recorded."""

from pathlib import Path

import pytest

from ray_slo.core.documents import read_yaml
from ray_slo.simulation.application_spec import ApplicationSpec
from ray_slo.simulation.sizing import PlanSpec
from ray_slo.simulation.sizing.search import size
from ray_slo.simulation.spec import SimulationSpec
from tests.kept import kept

CONFIGS = Path(__file__).parents[2] / "configs"
LINE = {"alpha_ms": 2, "beta_ms": 10, "max_batch_size": 16}
ONE = {
    "cluster": {"workers": 3, "models": {"m": {"latency_slo_ms": 80, "profile": LINE}}},
    "duration_s": 4,
    "seed": 3,
}
TWO = {
    "cluster": {
        "workers": {"fast": 2, "slow": 2},
        "models": {
            "m": {
                "latency_slo_ms": 90,
                "variants": {
                    "large": {
                        "accuracy": 90,
                        "profiles": {"fast": LINE, "slow": {**LINE, "alpha_ms": 4, "beta_ms": 20}},
                    },
                    "small": {"accuracy": 80, "profile": {"alpha_ms": 1, "beta_ms": 4}},
                },
            },
            "n": {"latency_slo_ms": 200, "profile": LINE},
        },
    },
    "duration_s": 4,
    "seed": 5,
}
ARRIVALS = [
    {"kind": "poisson", "rate": 350},
    {"kind": "gamma", "rate": 300, "shape": 0.2},
    {"kind": "constant", "rate": 400},
    {"kind": "mmpp", "rate": 300, "burst": {"peak": 2.5, "burst_s": 0.3, "calm_s": 0.9}},
    {"kind": "trace", "rates": [100, 500, 200], "interval_s": 1.5},
]


def summary(report):
    """All figures of a report, without the names of files and times of the clock."""
    return report.summary()


@pytest.mark.parametrize(
    ("policy", "arrivals"),
    [
        *(("deferred", arrivals) for arrivals in ARRIVALS),
        *((policy, ARRIVALS[0]) for policy in ("eager", "flex")),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else value,
)
def test_one_model(policy, arrivals):
    document = {**ONE, "workload": {"arrivals": arrivals}, "policy": {"name": policy}}
    report = SimulationSpec.model_validate(document).run()
    kept("simulation/figures", f"one model, {arrivals['kind']}, {policy}", summary(report))


@pytest.mark.parametrize("policy", ["deferred", "price", "timeout"])
@pytest.mark.parametrize("popularity", [{"m": 3, "n": 1}, {"m": 1, "n": 2}], ids=str)
def test_two_models_on_unlike_workers(policy, popularity):
    workload = {"arrivals": {"kind": "poisson", "rate": 400}, "popularity": popularity}
    document = {**TWO, "workload": workload, "policy": {"name": policy}, "latency_noise": 0.1}
    if policy == "timeout":
        document["policy"]["kwargs"] = {"timeout_ms": 15}
    report = SimulationSpec.model_validate(document).run()
    kept("simulation/figures", f"two models, {popularity}, {policy}", summary(report))


@pytest.mark.parametrize("name", ["simulate-resnet50", "simulate-bursty-zipf"])
def test_shipped_documents(name):
    document = {**read_yaml(CONFIGS / f"{name}.yaml"), "duration_s": 2, "warmup_s": 0.5}
    document["policy"] = {"name": "deferred"}
    report = SimulationSpec.model_validate(document).run(CONFIGS)
    kept("simulation/figures", name, summary(report))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["deferred", "price", "eager"])
def test_an_application(policy):
    document = {**read_yaml(CONFIGS / "simulate-application.yaml"), "policy": {"name": policy}}
    document |= {"duration_s": 30}
    report = ApplicationSpec.model_validate(document).run(CONFIGS)
    figures = {
        "summary": summary(report),
        "streams": report.streams().to_dict(orient="list"),
        "worker hours": report.worker_hours().to_dict()
        if hasattr(report.worker_hours(), "to_dict")
        else report.worker_hours(),
        "late": report.value(10.0, 20.0),
        "cost": report.cost(5.0, 25.0),
    }
    kept("simulation/figures", f"an application, {policy}", figures)


def plan_of(name):
    return PlanSpec.model_validate(read_yaml(CONFIGS / f"{name}.yaml")).build(CONFIGS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plan-resnet50", "plan-pipeline"])
def test_sizes(name):
    answers = [answer.to_json() for answer in size(plan_of(name))]
    kept("simulation/figures", name, answers)
