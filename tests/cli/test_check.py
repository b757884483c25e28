"""`ray-slo check` and `ray-slo schema`."""

import json

import jsonschema
import pytest
import yaml

from ray_slo.cli.check import applications, schema_of_configs
from tests.docs.pages import ROOT

SERVED = [
    path
    for path in sorted(ROOT.glob("configs/*.yaml"))
    if "applications" in yaml.safe_load(path.read_text(encoding="utf-8"))
]
MANIFESTS = [
    path
    for path in sorted(ROOT.glob("deploy/kuberay/*.yaml"))
    if "kind: RayService" in path.read_text(encoding="utf-8")
]
ONE = {"callable": "tests.cli.toys:Toy", "latency_slo_ms": 100}


def test_there_are_configs():
    assert len(SERVED) > 8 and MANIFESTS


@pytest.mark.slow
@pytest.mark.parametrize("path", [*SERVED, *MANIFESTS], ids=lambda p: p.stem)
def test_what_we_ship_is_right(run, path, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, out, err = run("check", path)
    assert code == 0, err
    for word in ("models.", "workers."):
        assert word in out or "groups." in out or "pipeline" in out
    assert "policy" in out and "defaults" in out


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def served(args, **fields):
    one = {"name": "app", "import_path": "ray_slo.serve:build_app", "args": args, **fields}
    return {"applications": [one]}


def test_what_would_run_and_what_was_not_written(run, file):
    args = {
        "models": {"m": {**ONE, "slo_classes": {"gold": 50}}},
        "workers": {"cpu": {"max_replicas": 3, "ray_actor_options": {"num_cpus": 2}}},
        "max_queued_requests": 7,
    }
    code, out, _ = run("check", file(served(args)), "--json")
    said = json.loads(out)["app"]
    assert code == 0
    assert said["models.m"] == "SLO 100 ms, gold 50 ms"
    assert said["workers.cpu"].startswith("1 to 3 workers; num_cpus 2")
    assert (said["policy"], said["planner"]) == ("auto (default)", "auto (default)")
    assert said["scheduler"] == "in the frontend"
    assert "profile_seconds" in said["defaults"]
    assert "max_queued_requests" not in said["defaults"]


def test_a_pipeline_groups_and_the_args_alone(run, file):
    task = {"callable": ONE["callable"]}
    tasks = {"find": task, "name": {**task, "parent": "find"}}
    code, out, _ = run("check", file({"pipeline": {"latency_slo_ms": 300, "tasks": tasks}}))
    assert code == 0
    assert "SLO 300 ms; find, name after find" in out
    groups = {
        "a": {"models": ["m"], "workers": {"cpu": {}}, "policy": "eager"},
        "b": {"models": ["n"], "workers": {"cpu": {}}},
    }
    code, out, _ = run("check", file(served({"models": {"m": ONE, "n": ONE}, "groups": groups})))
    assert code == 0
    assert "groups.a.workers.cpu" in out and "m; policy eager" in out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (served({"models": {"m": {**ONE, "latency_slo": 9}}}), "models.m.latency_slo"),
        (served({"models": {"m": {**ONE, "callable": "nowhere:M"}}}), "models.m.callable"),
        (served({"models": {"m": ONE}, "policy": "eagre"}), "eager"),
        (
            served({"models": {"m": ONE}}, deployments=[{"name": "worker"}]),
            "no deployment 'worker'; there are m, m-worker",
        ),
        ({"applications": [{"import_path": "nowhere:app"}]}, "default.import_path"),
        ({"applications": [{"name": "app"}]}, "applications.0.import_path: required"),
        ({"applications": [{"import_path": "a:b"}] * 2}, 'multiple configs for application "def'),
        (served({"models": {"m": ONE}}, deployments={"name": "m"}), "deployments: must be a list"),
        ({"pool": {}}, "this is a choice of machines"),
    ],
)
def test_mistakes_name_the_file_and_the_field(run, file, content, said):
    path = file(content)
    code, _, err = run("check", path)
    assert code == 2
    text = " ".join(err.split())
    assert f"Error: {path}: " in text
    assert said in text


def test_an_application_that_is_not_ours_is_only_imported(run, file):
    code, out, _ = run("check", file({"applications": [{"import_path": "tests.cli.toys:Toy"}]}))
    assert code == 0
    assert "only that it can be imported" in out


@pytest.fixture(scope="module")
def schema():
    return schema_of_configs()


@pytest.mark.parametrize("path", SERVED, ids=lambda p: p.stem)
def test_the_schema_takes_what_we_ship(schema, path):
    jsonschema.validate({"applications": applications(path)}, schema)


def test_the_schema_beside_the_configs_is_that_of_today(schema):
    """`ray-slo schema > configs/schema.json` writes it anew."""
    assert json.loads((ROOT / "configs" / "schema.json").read_text("utf-8")) == schema


def test_the_schema_refuses_a_field_that_is_not_there(schema, run):
    jsonschema.validate(served({"models": {"m": ONE}, "policy": "eager"}), schema)
    with pytest.raises(jsonschema.ValidationError, match="latency_slo"):
        jsonschema.validate(served({"models": {"m": {**ONE, "latency_slo": 9}}}), schema)
    code, out, _ = run("schema")
    assert code == 0 and json.loads(out) == schema
