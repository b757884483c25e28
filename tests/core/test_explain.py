import pytest
import yaml

from ray_slo.core.documents import load_yaml
from ray_slo.core.explain import validated
from ray_slo.simulation.spec import SimulationSpec

SPEC = """
policy: {name: eager}
cluster: {workers: 2, models: {a: {latency_slo_ms: 25, profile: {alpha_ms: 1}}}}
workload: {arrivals: {kind: poisson, rate: 100}}
duration_s: 1
"""
POISSON = "{kind: poisson, rate: 100}"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("workers: 2", "workers: 0", "cluster.workers: must be from 1 to 100000, got 0"),
        ("workers: 2", "workers: {t4: 0}", "cluster.workers.t4: must be from 1 to 100000, got"),
        ("workers: 2", "worker: 2", "cluster.worker: unknown key (did you mean 'workers'?); valid"),
        ("alpha_ms", "alfa_ms", "cluster.models.a.profile.alfa_ms: unknown key (did you mean 'alp"),
        ("{alpha_ms: 1}", "7", "cluster.models.a.profile: must be a mapping or null, got 7"),
        ("rate: 100", "rate: x", "workload.arrivals.rate: must be a number above 0, got 'x'"),
        ("rate: 100", "rate: .inf", "workload.arrivals.rate: must be a finite number above 0,"),
        (POISSON, "{kind: possion}", "workload.arrivals.kind: must be one of constant, poisson,"),
        (POISSON, "{knd: poisson, rate: 1}", "workload.arrivals: kind is required"),
        (
            POISSON,
            "{a: {kind: gamma, rate: 1}}",
            "workload.arrivals.a.shape: required; it must be a number",
        ),
        (
            POISSON,
            "{kind: trace, rates: [1, -2]}",
            "workload.arrivals.rates.1: must be at least 0,",
        ),
        (POISSON, "5", "workload.arrivals: must be a mapping, got 5"),
    ],
)
def test_one_line_says_what_is_wrong_where(old, new, says):
    assert old in SPEC
    with pytest.raises(ValueError) as error:
        validated(SimulationSpec, yaml.safe_load(SPEC.replace(old, new)))
    said, see = str(error.value).split("\n")
    assert said.startswith(says)
    assert see.startswith("See docs/reference/config.md#")


def test_valid_keys_are_said_once_for_each_place():
    with pytest.raises(ValueError, match="polic: unknown key") as error:
        validated(SimulationSpec, yaml.safe_load(SPEC.replace("policy", "polic") + "speed: 2"))
    assert str(error.value).count("valid keys are") == 1


BOMB = "".join(
    f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 9) if i else '0, 0'}]\n" for i in range(11)
)


def places(document, at=()):
    yield at
    if isinstance(document, dict):
        for key, value in document.items():
            yield from places(value, (*at, key))


@pytest.mark.parametrize("at", list(places(yaml.safe_load(SPEC))))
def test_nested_aliases_are_refused_at_once_wherever_they_are(at, tmp_path):
    (tmp_path / "bomb.yaml").write_text(BOMB)
    bomb = load_yaml(tmp_path / "bomb.yaml")["b10"]
    assert len(BOMB) < 1000
    document = place = yaml.safe_load(SPEC)
    for key in at[:-1]:
        place = place[key]
    if at:
        place[at[-1]] = bomb
    else:
        document = bomb
    with pytest.raises(ValueError, match=r"with what its aliases repeat, it has .* at most 1,000"):
        validated(SimulationSpec, document)
