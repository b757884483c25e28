from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from ray_slo.core.documents import read_yaml
from ray_slo.core.profiles import LatencyProfile, save_profiles
from ray_slo.policies.auto import Auto
from ray_slo.simulation.spec import SimulationSpec

CONFIGS = Path(__file__).parents[2] / "configs"
SPEC = """
cluster:
  workers: {t4: 2, cpu: 1}
  delay: {control_ms: 1, per_request_ms: 0.5}
  models:
    cats:
      latency_slo_ms: 100
      variants:
        small: {profile: {latency_ms: [5, 8]}, accuracy: 70}
        large: {profiles: {t4: {file: profiles.json}}}
workload: {arrivals: {kind: poisson, rate: 5}}
duration_s: 3
"""


def test_builds_the_cluster(tmp_path):
    save_profiles(tmp_path / "profiles.json", {"large": LatencyProfile([0.02, 0.03])})
    spec = SimulationSpec.model_validate(yaml.safe_load(SPEC))
    cluster = spec.cluster.build(tmp_path)
    assert {w: sorted(x.loaded) for w, x in cluster.workers.items()} == {
        "t4-0": ["large", "small"],
        "t4-1": ["large", "small"],
        "cpu-0": ["small"],
    }
    assert cluster.delay(2) == pytest.approx(0.002)
    assert cluster.models["cats"].latency_slo_s == 0.1
    assert cluster.profile("large", "t4-1").table == [0.02, 0.03]
    assert cluster.profile("small", "cpu-0").table == [0.005, 0.008]
    assert cluster.variants["small"].accuracy == 70
    assert isinstance(spec.make_policy(), Auto)


def test_a_profile_file_must_know_the_variant(tmp_path):
    save_profiles(tmp_path / "profiles.json", {"huge": LatencyProfile([0.02])})
    spec = SimulationSpec.model_validate(yaml.safe_load(SPEC))
    with pytest.raises(ValueError, match="no profile of 'large'; it has huge"):
        spec.cluster.build(tmp_path)


def test_the_true_delay_is_not_the_policys():
    data = yaml.safe_load(SPEC) | {"true_delay": {"control_ms": 7}}
    data["cluster"]["models"] = {"m": {"latency_slo_ms": 9, "profile": {"alpha_ms": 1}}}
    spec = SimulationSpec.model_validate(data)
    cluster = spec.cluster.build(Path())
    assert cluster.delay(1) == pytest.approx(0.0015)
    assert spec.options(cluster)["truth"].delay(1) == pytest.approx(0.007)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"policy": {"name": "flexx"}}, "policy 'flexx' is unknown; choose one of auto, deferred"),
        ({"cluster": {"models": {}}}, "cluster.models"),
        (
            {"cluster": {"models": {"m": {"latency_slo_ms": 5}}}},
            "give exactly one of profile and variants, got",
        ),
        (
            {"cluster": {"models": {"m": {"latency_slo_ms": 5, "profile": {"beta_ms": 1}}}}},
            "exactly one of alpha_ms",
        ),
        ({"duration": 5}, "duration"),
        ({"workload": {"arrivals": {"kind": "poisson"}}}, "rate"),
    ],
)
def test_bad_specs_are_refused_with_the_field(change, field):
    with pytest.raises(ValidationError, match=field):
        SimulationSpec.model_validate(yaml.safe_load(SPEC) | change)


# Of one cluster and a workload; `test_application_spec.py` has the other kind of document.
SHIPPED = sorted(set(CONFIGS.glob("simulate-*.yaml")) - {CONFIGS / "simulate-application.yaml"})


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_configs_run(path):
    spec = SimulationSpec.model_validate(read_yaml(path) | {"duration_s": 0.5, "warmup_s": 0})
    report = spec.model_copy(update={"worker_events": []}).run(path.parent)
    assert report.count("good") > 0


def test_read_yaml_says_what_is_wrong(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("- a list")
    with pytest.raises(ValueError, match="must hold a mapping, got a list"):
        read_yaml(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not YAML"):
        read_yaml(path)
