"""A config with one mistake is accepted, or refused with the place, the value and the choices."""

import copy
import random
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ray_slo
from ray_slo.cli import _describe, app
from ray_slo.cli._output import in_document
from ray_slo.core.documents import read_yaml
from ray_slo.core.text import quoted
from ray_slo.papers.ramsis.spec import SolveSpec
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.errors import ConfigError
from ray_slo.simulation.application_spec import ApplicationSpec
from ray_slo.simulation.sizing import PlanSpec
from ray_slo.simulation.spec import SimulationSpec

ROOT = Path(__file__).parents[3]
CONFIGS = sorted([*(ROOT / "configs").glob("*.yaml"), ROOT / "policies" / "digits.yaml"])
EACH = 30  # mutations of a document
VALUES = [
    *(None, True, "", "x", "a:b", 0, -1, 1.5, 2**31, 10**30, 1e308, float("nan"), float("inf")),
    *([], {}, [[]], [None], {"x": 1}, {1: 2}, {"": None}, [1, "a"], b"\xff"),
]
OF_USERS = {"args", "kwargs", "user_config", "ray_actor_options"}  # what is in there is not ours
JARGON = re.compile(r"Input should|Value error|validation error|unable to parse|Traceback")


def read(document, path):
    if path.stem == "simulate-application":
        in_document(None, ApplicationSpec, document).problem(ROOT / "configs")
    elif "applications" in document:
        parse_spec(document["applications"][0]["args"])
    elif path.parent.name == "policies":
        in_document(None, SolveSpec, document).problem(ROOT / "policies")
    elif path.name.startswith("plan-"):
        in_document(None, PlanSpec, document).build(ROOT / "configs")
    else:
        spec = in_document(None, SimulationSpec, document)
        spec.options(spec.cluster.build(ROOT / "configs"))


def paths(value, before=()):
    if before:
        yield before
    if isinstance(value, dict | list) and not OF_USERS & set(before):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths(value[key], (*before, key))


def slip(name, rng):
    i = rng.randrange(len(name))
    return rng.choice([name[:i] + name[i + 1 :], f"{name[:i]}q{name[i:]}", f"{name}s"])


def mutate(ours, rng):
    """Make one mistake; returns its place, and what a message about it may name."""
    *above, key = path = rng.choice(list(paths(ours)))
    owner = ours
    for step in above:
        owner = owner[step]
    how = rng.choice(["value", "value", "value", "drop", "slip", "misspell"])
    if how == "slip" and isinstance(owner[key], str) and len(owner[key]) > 2:
        given = owner[key] = slip(owner[key], rng)
        return path, {given}
    if how == "misspell" and isinstance(key, str) and len(key) > 2:
        wrong = slip(key, rng)
        items = [(wrong if name == key else name, value) for name, value in owner.items()]
        owner.clear()
        owner.update(items)
        return (*above, wrong), {key, wrong}
    if how == "drop":
        names = set(map(str, owner[key])) if isinstance(owner[key], dict) else {str(owner[key])}
        del owner[key]
        return path, names | {str(key)}
    lost = owner[key]
    owner[key] = rng.choice(VALUES)
    names = set(map(str, lost)) if isinstance(lost, dict | list) else set()
    if isinstance(owner[key], dict):
        names |= {f"{key}.{name}" for name in owner[key]} | {repr(name) for name in owner[key]}
    shown = {quoted(owner[key])[:20], *names}
    return path, {str(key), *shown} if owner[key] in (None, [], {}) else shown


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_mistake_is_said_in_plain_words_with_place_and_value(path):
    original, rng, refused = read_yaml(path), random.Random(path.stem), 0
    for _ in range(EACH):
        document = copy.deepcopy(original)
        ours = document["applications"][0]["args"] if "applications" in document else document
        place, names = mutate(ours, rng)
        try:
            read(document, path)
        except (ValueError, OSError) as error:
            refused += 1
            said = _describe(error)
            assert not JARGON.search(said), said
            assert len(said) < 3000
            named = ".".join(map(str, place))[:150]
            lines = [line.split(":")[0] for line in said.split("\n")]
            is_placed = named in said or any(named.startswith(line) for line in lines)
            assert is_placed or any(name in said for name in names), (named, said)
            values = any(name in said for name in names) or "required" in said
            assert values or re.search(r"got .|give |the key must be|must not be empty", said), said
    assert refused > EACH / 5


OPTIONS = {
    "simulate": ["--rate", "--workers", "--slo-ms", "--duration-s", "--seed"],
    "profile": ["--seconds", "--max-batch", "--threads", "--quantile"],
    "bench": ["--rate", "--duration-s", "--shape", "--slo-ms", "--timeout-s", "--seed"],
    "solve": ["--jobs"],
    "new": ["--slo-ms"],
    "dashboards": ["--objective", "--max-plan-age-s", "--min-requests"],
    "report": ["--warmup-s"],
}
TARGETS = {"profile": ["no:where"], "bench": ["http://127.0.0.1:9/"], "report": ["none"]}


@pytest.mark.slow
@pytest.mark.parametrize("command", OPTIONS)
def test_a_wrong_option_is_a_message_and_code_2(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    given = TARGETS.get(command, ["app"] if command == "new" else [])
    given = ["spec.yaml"] if command == "solve" else given
    given = ["--out", "dash"] if command == "dashboards" else given
    for option in OPTIONS[command]:
        for value in ("x", "nan", "-1"):
            result = CliRunner().invoke(app, [command, *given, option, value])
            said = " ".join(result.output.split())
            assert result.exit_code == 2, (option, value, said)
            assert isinstance(result.exception, SystemExit)
            assert not JARGON.search(said), said
            assert value in said, said
            named = (option, option.strip("-").replace("-", "_"), option.strip("-"))
            assert any(name in said for name in (*named, "workers", "latency_slo_ms")), said


class Same:
    def __call__(self, items: list) -> list:
        return items


async def same(items: list) -> list:
    return items


def variant(**given):
    ray_slo.Variant(**{"name": "v", "accuracy": 50, "load": Same, **given})


def pipeline(**given):
    ray_slo.Pipeline(**{"tasks": [ray_slo.Task("t", Same)], "latency_slo_ms": 100, **given})


def task(**given):
    pipeline(tasks=[ray_slo.Task(**{"name": "t", "callable": Same, **given})])


def application(**given):
    models = {"m": {"callable": Same, "latency_slo_ms": 100}}
    ray_slo.application(**{"models": models, **given})


FROM_PYTHON = {
    "deployment": (
        lambda **given: ray_slo.deployment(**{"latency_slo_ms": 100, **given})(Same),
        ("latency_slo_ms", "variants", "policy", "num_replicas", "name", "scheduler", "planner"),
    ),
    "batch": (
        lambda **given: ray_slo.batch(**{"latency_slo_ms": 100, **given})(same),
        ("latency_slo_ms", "max_batch_size", "max_concurrent_batches", "margin_ms", "profile"),
    ),
    "Variant": (variant, ("accuracy", "load", "kwargs")),
    "Pipeline": (pipeline, ("tasks", "latency_slo_ms", "slo_classes", "path_accuracies", "policy")),
    "Task": (task, ("name", "variants", "kwargs", "accuracy", "factors", "options")),
    "application": (application, ("models", "pipelines", "workers", "planner", "groups", "policy")),
}


@pytest.mark.parametrize("what", FROM_PYTHON)
def test_wrong_arguments_in_python_are_refused_by_name_and_value(what):
    call, names = FROM_PYTHON[what]
    for name in names:
        for value in (-1, True, float("inf"), b"\xff", [1]):
            with pytest.raises((ValueError, ConfigError)) as error:
                call(**{name: value})
            said = str(error.value)
            assert not JARGON.search(said), said
            assert name in said, (name, value, said)
            element = value[0] if isinstance(value, list) else value
            assert quoted(value) in said or quoted(element) in said, (name, value, said)


def test_what_serve_could_not_hand_on_is_refused_by_name():
    made = ray_slo.deployment(latency_slo_ms=100, user_config=Same)(Same)
    with pytest.raises(
        ValueError, match=r"models\.Same\.user_config: must be JSON, .*class 'tests"
    ):
        made.bind()
    endless = ray_slo.deployment(latency_slo_ms=100, ray_actor_options={"num_cpus": float("inf")})
    with pytest.raises(ValueError, match=r"ray_actor_options: .* got \{'num_cpus': inf\}"):
        endless(Same).bind()
