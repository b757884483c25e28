"""A document that a command does not read is named for what it is, with what to give instead."""

import pytest
import yaml

OTHERS = "applications: [{name: other, import_path: 'my_app:app', deployments: [{name: Model}]}]\n"
DOCUMENTS = {
    "rayservice": ("", "a Kubernetes manifest of a RayService"),
    "deployment": (
        "{apiVersion: apps/v1, kind: Deployment, metadata: {name: x}}",
        "a Kubernetes manifest of a Deployment",
    ),
    "serve": (OTHERS, "a config of `serve run`"),
    "old": ("import_path: fruit:graph\n", "an application of Serve"),
    "args": ("models: {m: {callable: 'a:B', latency_slo_ms: 9}}\n", "the args of an application"),
    "two": ("apiVersion: v1\n---\nkind: RayService\n", "a second document begins here"),
}
WANTED = {
    "simulate": "wanted a file like configs/simulate-resnet50.yaml",
    "plan": "wanted a file like configs/plan-resnet50.yaml",
    "solve": "wanted a file like policies/digits.yaml",
    "profile": "wanted MODULE:CLASS, or a `serve run` config like configs/digits.yaml",
}
TAKEN = "the ray-slo applications in it"


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "document.yaml"
        path.write_text(content)
        return path

    return write


def manifest(config):
    head = {"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": {"name": "x"}}
    return yaml.safe_dump({**head, "spec": {"serveConfigV2": config, "rayClusterConfig": {}}})


@pytest.mark.parametrize("command", WANTED)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_another_document(run, file, command, name):
    content, said = DOCUMENTS[name]
    path = file(content or manifest(OTHERS))
    code, _, err = run(command, path, *(("--rate", 5) if command == "simulate" else ()))
    err = " ".join(err.split())
    assert code == 2
    assert f"Error: {path}: " in err
    if command == "profile" and name in ("rayservice", "serve", "old"):
        assert ("(fruit:graph)" if name == "old" else "application 'other' (my_app:app)") in err
        assert "to measure its class, give MODULE:CLASS" in err
        return
    if command == "simulate" and name in ("rayservice", "serve", "old"):
        assert "one application with import_path ray_slo.serve:build_app can be simulated" in err
        return
    if command == "simulate" and name in ("args", "deployment"):
        assert (
            "cannot import 'a:B'" if name == "args" else "a `serve run` config like configs/digits"
        ) in err
        return
    assert said in err
    if name != "two":
        assert WANTED[command] in err


@pytest.mark.parametrize("command", ["simulate", "plan", "solve", "profile"])
def test_documents_of_other_commands(run, command):
    for path, of in (
        ("configs/simulate-resnet50.yaml", ("simulate", "plan")),
        ("configs/simulate-application.yaml", ("simulate", "plan")),
        ("configs/plan-pool.yaml", ("plan",)),
        ("policies/digits.yaml", ("solve",)),
    ):
        if command not in of:
            code, _, err = run(command, path)
            assert code == 2
            assert f"`ray-slo {of[0]}`" in err and WANTED[command] in " ".join(err.split())


def test_a_rayservice_without_a_config(run, file):
    for config in ("", 7, "- a\n"):
        code, _, err = run("profile", file(manifest(config)))
        assert code == 2
        assert "a RayService without a `serve run` config in spec.serveConfigV2" in err
    code, _, err = run("profile", file(manifest("a: [")))
    assert code == 2
    assert "spec.serveConfigV2: not YAML, line 1" in err


def test_the_models_of_a_rayservice_are_measured_and_other_applications_named(run, file):
    ours = {"m": {"callable": "tests.cli.toys:Toy", "latency_slo_ms": 500}}
    one = {"name": "one", "import_path": "ray_slo.serve:build_app", "args": {"models": ours}}
    two = {"name": "two", "import_path": "my_app:app"}
    path = file(manifest(yaml.safe_dump({"applications": [one, two]})))
    code, out, err = run("profile", path, "--seconds", 0.1, "--max-batch", 1, "--json")
    assert code == 0, err
    assert '"m"' in out
    assert f"left out: {path}: application 'two' (my_app:app)" in err


def test_a_file_is_no_url(run, file):
    path = file(OTHERS)
    code, _, err = run("bench", path)
    assert code == 2
    assert f"url: {path} is a file; give the URL of a running application" in " ".join(err.split())
