"""What all `serve run` configs have in common: where they listen, what they need, how to load them,
and which weights they serve."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import typer
import yaml
from ray.serve.schema import HTTPOptionsSchema, ServeDeploySchema

from deployments.imagenet import ImageNet
from deployments.text import Entailment
from deployments.traffic import Detect, Faces, Vehicles, detection
from deployments.traffic import app as traffic
from ray_slo.cli import app as cli
from ray_slo.core.environment import WEIGHTS
from ray_slo.core.trees import Tree
from ray_slo.load.workload import load_payloads
from ray_slo.models import text, vision
from ray_slo.models.loading import WORDS
from ray_slo.serve.config.resolve import parse_spec

ROOT = Path(__file__).parents[2]
CONFIGS = [
    path
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if "applications" in yaml.safe_load(path.read_text())
]
HAS_A_SWITCH = ("imagenet-ramsis", "recommender-kairos", "text-ramsis", "traffic-loki")
NEEDS = {  # beyond ray-slo, to make payloads
    "digits": ("sklearn", "scikit-learn is not installed: pip install 'ray-slo[digits]'"),
    "traffic": ("skimage", "scikit-image is not installed: pip install 'ray-slo[traffic]'"),
}


@pytest.fixture(params=CONFIGS, ids=lambda path: path.stem)
def config(request) -> Path:
    return request.param


def head(config: Path) -> list[str]:
    """The comment that the file begins with, without its marks."""
    lines = config.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").strip() for line in lines[:end]]


def spec_of(config: Path):
    (application,) = yaml.safe_load(config.read_text())["applications"]
    return parse_spec(application["args"])


def test_there_are_configs():
    assert len(CONFIGS) > 10
    assert set(HAS_A_SWITCH) < {config.stem for config in CONFIGS}


def test_serve_takes_it_and_listens_on_this_machine_only(config):
    given = yaml.safe_load(config.read_text())
    assert set(given) <= set(ServeDeploySchema.model_fields)
    # Serve ignores unknown fields there, so a misspelt host would be no host.
    assert set(given["http_options"]) <= set(HTTPOptionsSchema.model_fields)
    schema = ServeDeploySchema.model_validate(given)
    assert (schema.http_options.host, schema.http_options.port) == ("127.0.0.1", 8000)


def test_the_head_says_how_to_start_it_and_what_it_needs(config):
    schema, first, second, *_ = head(config)
    assert schema == "yaml-language-server: $schema=schema.json"
    assert first.startswith(f"ray-slo run configs/{config.name}")
    said = re.match(r"Needs: ([\d.]+) CPUs? \(workers\)", second)
    assert said, second
    cpus = sum(
        worker.num_replicas * worker.ray_actor_options.get("num_cpus", 1)
        for worker in spec_of(config).workers.values()
    )
    assert float(said[1]) == pytest.approx(cpus)


def bench(config: Path) -> list[str]:
    """The words of the `ray-slo bench` command in a file's head."""
    text = "\n".join(head(config)).replace("\\\n", " ")
    (command,) = re.findall(r"^ray-slo bench .*$", text, re.MULTILINE)
    return shlex.split(command)[1:]


def test_the_head_has_a_bench_command_with_the_models_slo(config):
    name, *rest = bench(config)
    command = typer.main.get_command(cli).commands[name]
    with command.make_context(name, list(rest)) as context:
        given = context.params
    spec = spec_of(config)
    assert given["slo_ms"] == pytest.approx(1e3 * tree_of(config, spec).slo_s)
    assert given["url"].startswith("http://127.0.0.1:8000/")


def tree_of(config: Path, spec) -> Tree:
    """What the `ray-slo bench` command asks for."""
    path = urlsplit(bench(config)[1]).path.strip("/")
    assert path or len(spec.trees) == 1
    return spec.trees[path] if path else next(iter(spec.trees.values()))


def payloads_of(config: Path) -> str:
    words = bench(config)
    named = words[words.index("--payload") + 1]
    module, _, _ = named.partition(":")
    folder = module.split(".")[1]
    if module.startswith("deployments."):
        assert named == f"deployments.{folder}:payloads"
    if folder in NEEDS:
        package, why = NEEDS[folder]
        pytest.importorskip(package, reason=why)
    return named


def test_the_application_takes_each_payload(config):
    spec = spec_of(config)
    tree = tree_of(config, spec)
    assert taken(payloads_of(config), spec.models[tree[tree.root].model].load()) >= 5


@cache  # several files have the same class and payloads
def taken(named: str, model: type) -> int:
    """The number of payloads, if the model takes all of them."""
    payloads = load_payloads(named)
    preprocess = getattr(model, "preprocess", lambda item: item)
    for index in range(len(payloads)):
        body, kind = payloads.body(index)
        assert body and kind
        preprocess(payloads.items[index])
    return len(payloads)


def test_each_of_deployments_has_payloads():
    named = {bench(config)[-1] for config in CONFIGS}
    folders = {path.parent.name for path in (ROOT / "deployments").glob("*/__init__.py")}
    assert {f"deployments.{folder}:payloads" for folder in folders} <= named
    readme = (ROOT / "deployments" / "README.md").read_text()
    for folder in folders:
        assert f"--payload deployments.{folder}:payloads" in readme


# --- models --------------------------------------------------------------------------------------

CLASSES = {  # by folder of deployments, and by task: the class, and the module of its networks
    "imagenet": {"": (ImageNet, vision)},
    "text": {"": (Entailment, text)},
    "traffic": {
        "detect": (Detect, detection),
        "vehicles": (Vehicles, vision),
        "faces": (Faces, vision),
    },
}
NETWORKS = [config for config in CONFIGS if config.stem.partition("-")[0] in CLASSES]


def tasks_of(config: Path):
    """The models of a file, each with its class and the module of its networks."""
    classes = CLASSES[config.stem.partition("-")[0]]
    for task, model in spec_of(config).models.items():
        yield model, *(classes.get(task) or classes[""])


@pytest.mark.parametrize("config", NETWORKS, ids=lambda path: path.stem)
def test_the_file_names_what_there_is(config):
    for model, wanted, module in tasks_of(config):
        assert model.load() is wanted and model.variants
        for name, variant in model.variants.items():
            assert variant.loader() is module.load
            assert variant.kwargs["name"] == name
    spec = spec_of(config)
    for pipeline in spec.pipelines.values():
        assert pipeline.parents == {"detect": None, "vehicles": "detect", "faces": "detect"}
        assert pipeline.factors.items() >= traffic.FACTORS.items()


@pytest.mark.parametrize("config", NETWORKS, ids=lambda path: path.stem)
def test_the_file_states_the_published_accuracies(config):
    if not config.stem.startswith("text"):
        why = "torchvision is not installed: pip install 'ray-slo[imagenet]'"
        pytest.importorskip("torchvision", reason=why)
    for model, _, module in tasks_of(config):
        for name, variant in model.variants.items():
            assert variant.accuracy == module.accuracy(name)


def test_importing_and_preprocessing_needs_neither_networks_nor_ray():
    code = """
import sys
from deployments import imagenet, ocr, recommender, text, traffic
import ray_slo.models.text, ray_slo.models.vision
for model in (imagenet.ImageNet, ocr.Detect, text.Entailment, traffic.Detect):
    model.preprocess(model.example_input())
recommender.Recommender.preprocess(recommender.Recommender.example_input(3))
heavy = {"torch", "torchvision", "transformers", "onnxruntime", "cv2", "ray"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"


# --- weights -------------------------------------------------------------------------------------


def given_weights(config: Path) -> list[object]:
    """The arguments `weights` of models and variants, where there are any."""
    spec = spec_of(config)
    owners = [
        *spec.models.values(),
        *(v for m in spec.models.values() for v in m.variants.values()),
    ]
    return [owner.kwargs["weights"] for owner in owners if "weights" in owner.kwargs]


def test_the_switch_decides_unless_the_file_is_random_by_name(config):
    if config.stem == "imagenet-random":
        assert given_weights(config) == ["none"] * 3
    else:
        assert given_weights(config) == []


@pytest.mark.parametrize("name", HAS_A_SWITCH)
def test_the_file_shows_where_to_switch(name):
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    switched = text.replace("  # runtime_env:", "  runtime_env:")
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(switched)).applications
    assert application.runtime_env == {"env_vars": {WEIGHTS: "none"}}
    assert "none" in WORDS
    active = switched == text
    assert active == (name == "text-ramsis")  # which must work without a download
    assert active or f"{WEIGHTS}=none ray-slo run configs/{name}.yaml" in text
