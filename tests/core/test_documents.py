import copy

import numpy as np
import pytest

from ray_slo.core.documents import Strict, load_arrays, load_columns, load_yaml
from ray_slo.core.explain import validated
from ray_slo.simulation.application_spec import ApplicationSpec
from ray_slo.simulation.sizing import PlanSpec
from ray_slo.simulation.spec import SimulationSpec


def test_a_key_twice_is_refused(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: {b: 1, c: {d: 1}}\ne: &x {f: [1, {g: 2}]}\nh: *x\n")
    assert load_yaml(path) == {
        "a": {"b": 1, "c": {"d": 1}},
        "e": {"f": [1, {"g": 2}]},
        "h": {"f": [1, {"g": 2}]},
    }
    path.write_text("a: {b: 1}\ne: [{f: 1,\n  f: 2}]\n")
    with pytest.raises(ValueError, match=r"a.yaml: not YAML: line 3: the key 'f' was there before"):
        load_yaml(path)
    path.write_text("")
    assert load_yaml(path) is None


def test_an_alias_to_its_own_mapping_is_read_once(tmp_path):
    path = tmp_path / "loop.yaml"
    path.write_text("&top\nname: a\nagain: [*top, *top]\n", encoding="utf-8")
    read = load_yaml(path)
    assert read["name"] == "a" and read["again"][0] is read


def test_arrays_of_another_file_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones(2))
    assert load_arrays(tmp_path / "a.npz", "a table")["x"].tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"a.npz: not a table: it has no header$"):
        load_columns(tmp_path / "a.npz", "a table", "v1", "header", Strict)
    np.savez(tmp_path / "b.npz", x=np.ones(2), header=np.array('{"format": "v1"}'))
    with pytest.raises(ValueError, match=r"b.npz: not a table: it has no y, z$"):
        load_columns(tmp_path / "b.npz", "a table", "v1", "header", Strict, "z", "x", "y")
    with pytest.raises(IsADirectoryError):
        load_arrays(tmp_path, "a table")


DAY_MS = 86_400_000
CLUSTER = {"models": {"m": {"latency_slo_ms": 9, "profile": {"alpha_ms": 1, "beta_ms": 2}}}}
ROOT = {"latency_slo_ms": 9, "profile": {"alpha_ms": 1}}
WORKLOAD = {"arrivals": {"kind": "poisson", "rate": 5}}
SIMULATION = {"cluster": CLUSTER, "workload": WORKLOAD, "duration_s": 1}
APPLICATION = {
    "workers": {"gpu": {"max_replicas": 2}},
    "models": {"m": ROOT},
    "workloads": {"m": WORKLOAD},
}


@pytest.mark.parametrize(
    ("spec", "document", "field"),
    [
        (SimulationSpec, SIMULATION, "cluster.models.m.latency_slo_ms"),
        (SimulationSpec, SIMULATION, "cluster.models.m.profile.alpha_ms"),
        (SimulationSpec, SIMULATION, "cluster.models.m.profile.beta_ms"),
        (SimulationSpec, SIMULATION, "cluster.delay.control_ms"),
        (SimulationSpec, SIMULATION, "report_delay_ms"),
        (PlanSpec, SIMULATION, "cluster.models.m.latency_slo_ms"),
        (ApplicationSpec, APPLICATION, "models.m.latency_slo_ms"),
        (ApplicationSpec, APPLICATION, "models.m.slo_classes.gold"),
    ],
)
def test_no_time_is_longer_than_a_day(spec, document, field):
    """A simulation of an SLO of 1e308 ms would never end."""

    def at(value):
        made = copy.deepcopy(document)
        *path, last = field.split(".")
        owner = made
        for key in path:
            owner = owner.setdefault(key, {})
        owner[last] = value
        return made

    validated(spec, at(DAY_MS))
    for value in (1e308, DAY_MS + 1):
        with pytest.raises(ValueError) as refused:
            validated(spec, at(value))
        first, see = str(refused.value).splitlines()
        assert first.startswith(f"{field}: must be ")
        assert f"at most {DAY_MS}" in first or f"from 0 to {DAY_MS}" in first
        assert see.startswith("See docs/")
