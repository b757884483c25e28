"""The Kubernetes manifests, against every schema that is published for what they hold.

KubeRay's own fields: kuberay_rayservice_v1.json beside this file, transcribed from KubeRay's API
reference, or the operator's whole CRD, if RAY_SLO_KUBERAY_CRD names that file. Pods: Kubernetes'
own schemas, as the package kubernetes-validate carries them. What Serve is to run: Ray's schema,
and what ray-slo makes of it.
"""

import copy
import json
import os
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import ray
import yaml
from kubernetes_validate.utils import ValidationError
from ray.serve.schema import ServeDeploySchema

from ray_slo.serve import build_app
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.deadlines import PROXY_CALLBACK, PROXY_CALLBACK_ENV
from ray_slo.serve.ray_private.versions import NEWEST

ROOT = Path(__file__).parents[2]
HERE = ROOT / "deploy/kuberay"
MANIFESTS = {path.name: yaml.safe_load(path.read_text()) for path in sorted(HERE.glob("*.yaml"))}
SCHEMA = json.loads((Path(__file__).parent / "kuberay_rayservice_v1.json").read_text())
KUBERNETES = "1.36"


def crd_schema(path):
    """The schema of version v1 in a CustomResourceDefinition of the operator; strict, as a server
    drops unknown fields in silence."""

    def strict(schema):
        if isinstance(schema, list):
            return [strict(s) for s in schema]
        if not isinstance(schema, dict):
            return schema
        schema = {key: strict(value) for key, value in schema.items()}
        open_ended = schema.get("x-kubernetes-preserve-unknown-fields")
        if isinstance(schema.get("properties"), dict) and "type" in schema and not open_ended:
            schema.setdefault("additionalProperties", False)
        return schema

    versions = yaml.safe_load(Path(path).read_text())["spec"]["versions"]
    schema = next(v for v in versions if v["name"] == "v1")["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    return strict(schema)


def check_kuberay(manifest):
    jsonschema.validate(manifest, SCHEMA)
    if path := os.environ.get("RAY_SLO_KUBERAY_CRD"):
        jsonschema.validate(manifest, crd_schema(path))


def groups(manifest):
    cluster = manifest["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def check_pods(manifest):
    for group in groups(manifest):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def applications(manifest):
    return yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]


@pytest.fixture(params=MANIFESTS)
def manifest(request):
    return copy.deepcopy(MANIFESTS[request.param])


def test_there_are_manifests():
    assert {"rayservice.yaml", "rayservice-kinds.yaml"} <= MANIFESTS.keys()


def test_fields_are_kuberays_and_kubernetes(manifest):
    check_kuberay(manifest)
    check_pods(manifest)


def test_a_misspelt_field_is_found():
    manifest = copy.deepcopy(MANIFESTS["rayservice-kinds.yaml"])
    spec = manifest["spec"]
    for owner in (spec, spec["rayClusterConfig"], *groups(manifest)):
        owner["rayStartParms"] = {}
        with pytest.raises(jsonschema.ValidationError, match="rayStartParms"):
            check_kuberay(manifest)
        del owner["rayStartParms"]
    groups(manifest)[1]["minReplicas"] = "2"
    with pytest.raises(jsonschema.ValidationError, match="is not of type 'integer'"):
        check_kuberay(manifest)
    groups(manifest)[0]["template"]["spec"]["containers"][0]["immage"] = "x"
    with pytest.raises(ValidationError, match="immage"):
        check_pods(manifest)


def test_serve_takes_the_configuration(manifest):
    ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    for application in applications(manifest):
        assert application["import_path"] == "ray_slo.serve:build_app"
        app = build_app(application["args"])
        assert type(app).__name__ == "Application"


def test_the_same_application_as_in_configs():
    for manifest, config in (
        ("rayservice.yaml", "digits.yaml"),
        ("rayservice-kinds.yaml", "recommender-kairos.yaml"),
    ):
        (here,) = applications(MANIFESTS[manifest])
        (there,) = yaml.safe_load((ROOT / "configs" / config).read_text())["applications"]
        for key in ("models", "policy", "planner"):
            assert here["args"].get(key) == there["args"].get(key)
        assert here["args"]["workers"].keys() == there["args"]["workers"].keys()


def test_every_replica_has_a_place(manifest):
    """No pod group is short of what one replica asks for, and the head takes none."""
    head, *workers = groups(manifest)
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert manifest["spec"]["excludeHeadPodFromServeSvc"] is True
    (application,) = applications(manifest)
    spec = parse_spec(application["args"])
    wanted = [
        (spec.frontend_actor_options, spec.num_frontends),
        *((k.ray_actor_options, k.most_replicas) for k in spec.workers.values()),
    ]
    for options, replicas in wanted:
        assert options["num_cpus"] > 0  # else it may be placed on the head
        fitting = sum(
            group["maxReplicas"]
            for group in workers
            if all(offered(group).get(r, 0) >= n for r, n in needed(options).items())
        )
        assert fitting >= replicas


def needed(options):
    named = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0)}
    return {**named, **options.get("resources", {})}


def offered(group):
    """What KubeRay tells Ray of a pod: its limits, and the group's own resources."""
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    own = json.loads(json.loads(group["rayStartParams"].get("resources", '"{}"')))
    return {"CPU": int(limits["cpu"]), "GPU": int(limits.get("nvidia.com/gpu", 0)), **own}


def test_rays_ports_ask_for_a_token(manifest):
    assert manifest["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_versions_and_the_proxys_callback(manifest):
    dockerfile = (HERE / "Dockerfile").read_text()
    version = manifest["spec"]["rayClusterConfig"]["rayVersion"]
    newest = "{}.{}.".format(*NEWEST)
    assert version.startswith(newest)
    if ray.__version__.startswith(newest):  # the tests run with older releases, too
        assert version == ray.__version__
    assert f"rayproject/ray:{version}-" in dockerfile
    images = set()
    for group in groups(manifest):
        (container,) = group["template"]["spec"]["containers"]
        images.add(container["image"])
        env = {variable["name"]: variable["value"] for variable in container["env"]}
        assert env[PROXY_CALLBACK_ENV] == PROXY_CALLBACK
    assert len(images) == 1
    for copied in ("ray_slo", "deployments", "policies", "pyproject.toml", "README.md", "LICENSE"):
        assert copied in dockerfile and (ROOT / copied).exists()
