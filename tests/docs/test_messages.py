"""The sections that messages name exist, and list the fields that the message is about."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ray_slo
from ray_slo.cli import app
from ray_slo.core.explain import validated
from ray_slo.core.pages import CLI, DEPLOYMENTS, PAGE, PIPELINES, SECTIONS, anchor_of
from ray_slo.serve import build_app
from ray_slo.serve.config.app import AppConfig
from ray_slo.serve.deadlines import deadline_scope
from ray_slo.serve.errors import ConfigError
from ray_slo.simulation.spec import SimulationSpec

TEXT = (Path(__file__).parents[2] / PAGE).read_text(encoding="utf-8")


def slug(heading):
    """The anchor that MkDocs, and code hosts, give a heading."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def listed():
    """Classes whose fields the page lists, by the anchor of their section."""
    found, anchor = {}, ""
    for line in TEXT.splitlines():
        if heading := re.match(r"#+ (.+)", line):
            anchor = slug(heading[1])
        if marker := re.match(r"<!-- fields: (\S+) -->", line):
            module, _, name = marker[1].rpartition(".")
            found.setdefault(anchor, []).append(getattr(import_module(module), name))
    return found


def test_every_class_on_the_page_is_named_with_its_section():
    paths = {
        anchor: {f"{c.__module__}.{c.__qualname__}".removeprefix("ray_slo.") for c in classes}
        for anchor, classes in listed().items()
    }
    assert paths == {anchor: set(classes) for anchor, classes in SECTIONS.items()}
    assert anchor_of(AppConfig) == "an-application"
    assert anchor_of(dict) is None


MODEL = {"callable": "ray_slo.demo.digits:Digits", "latency_slo_ms": 200}


@pytest.mark.parametrize(
    ("mistake", "sections"),
    [
        ({"modells": {}}, ["an-application"]),
        ({"models": {"m": {**MODEL, "latency_slo_ms": 0}}}, ["models"]),
        ({"models": {"m": {**MODEL, "callable": "ray_slo.demo.digits:Digit"}}}, ["models"]),
        ({"models": {"m": MODEL}, "workers": {"a": {"num_replicas": 0}}}, ["workers"]),
        ({"models": {"m": MODEL}, "policy": "defered"}, ["policy"]),
        ({"models": {"m": MODEL}, "planner": "loki"}, ["planner"]),
        ({"models": {"m": {**MODEL, "x": 1}}, "policy": {"x": 1}}, ["models", "policy"]),
        ({"pipelines": {"p": {"latency_slo_ms": 1, "tasks": {"t": {}}}}}, ["tasks"]),
    ],
)
def test_a_message_ends_with_the_section_on_the_field(mistake, sections):
    with pytest.raises(ValueError) as error:
        build_app(mistake)
    named = " and ".join(f"{PAGE}#{section}" for section in sections)
    assert str(error.value).splitlines()[-1] == f"See {named}"


def test_so_do_those_about_documents_to_simulate():
    with pytest.raises(ValueError, match=f"See {PAGE}#cluster and {PAGE}#workload$"):
        validated(SimulationSpec, {"workload": {"arrivals": {"kind": "poisson"}}})


class Same:
    def __call__(self, items: list) -> list:
        return items


async def same(items: list) -> list:
    return items


def made(**members):
    return type("Made", (), {"__call__": lambda self, items: items, **members})


WRONG = [True, -1, "x", float("nan"), float("inf"), 1e308, [], {}, b"\xff", 10**5000]
IN_PYTHON = {
    "batch": (lambda bad: ray_slo.batch(bad)(same), DEPLOYMENTS),
    "margin": (lambda bad: ray_slo.batch(100, margin_ms=bad)(same), DEPLOYMENTS),
    "changed": (lambda bad: ray_slo.batch(100)(same).set_latency_slo_ms(bad), DEPLOYMENTS),
    "function": (lambda bad: ray_slo.batch(100)(bad), DEPLOYMENTS),
    "class": (lambda bad: ray_slo.deployment(latency_slo_ms=100)(bad), DEPLOYMENTS),
    "slo": (lambda bad: ray_slo.deployment(latency_slo_ms=bad)(Same), f"{PAGE}#models"),
    "variant": (lambda bad: ray_slo.Variant("v", accuracy=bad, load=Same), f"{PAGE}#variants"),
    "tasks": (lambda bad: ray_slo.Pipeline(bad or 1, latency_slo_ms=100), PIPELINES),
    "task": (lambda bad: ray_slo.Pipeline([bad], latency_slo_ms=100), PIPELINES),
}


@pytest.mark.parametrize("what", IN_PYTHON)
def test_mistakes_in_python_end_with_a_place_in_the_docs(what):
    call, place = IN_PYTHON[what]
    for bad in WRONG:
        with pytest.raises((ValueError, ConfigError)) as error:
            call(bad)
        said = str(error.value)
        assert said.splitlines()[-1] == f"See {place}", said
        assert "Exceeds the limit" not in said, said
        assert len(said) < 1000


HOOKS = {
    "preprocess": [lambda: 1, lambda a, b: 1, 1],
    "postprocess": [lambda: 1, lambda a, b: 1, 1],
    "size": [lambda: 1, lambda a, b: 1, 1],
    "example_input": [lambda a, b: 1, 1],
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_could_not_be_called_is_refused_by_name(name):
    for wrong in HOOKS[name]:
        with pytest.raises(ValueError, match=rf"Made\.{name} .*{name}\(") as error:
            ray_slo.deployment(latency_slo_ms=100)(made(**{name: staticmethod(wrong)}))
        assert str(error.value).splitlines()[-1] == f"See {DEPLOYMENTS}"
    rights = [lambda *given: 1, lambda item=None: 1, *[len] * (name != "example_input")]
    for right in rights:
        ray_slo.deployment(latency_slo_ms=100)(made(**{name: staticmethod(right)}))


def test_a_batch_method_with_a_further_required_argument_is_refused():
    with pytest.raises(ValueError, match=r"__call__ takes \(self, items, \*, more\); it must be"):
        ray_slo.deployment(latency_slo_ms=100)(made(__call__=lambda self, items, *, more: items))


def test_a_scope_of_no_time_is_refused():
    for bad in ("x", True, [], float("nan"), 10**5000):
        with pytest.raises(ValueError, match="latency_ms of deadline_scope"), deadline_scope(bad):
            pass


def test_a_task_does_not_drop_empty_values_of_a_wrong_kind():
    for name in ("kwargs", "factors", "accuracy", "model", "parent"):
        given = {"callable": Same, name: []}
        with pytest.raises(ValueError, match=rf"pipeline\.tasks\.t\.{name}:"):
            ray_slo.Pipeline([ray_slo.Task("t", **given)], latency_slo_ms=100)


COMMANDS = {
    "simulate": (["--rate", "-1"], f"{CLI}#ray-slo-simulate"),
    "simulate ": (["--latency-noise", "11"], f"{PAGE}#a-simulation"),
    "plan": (["none.yaml"], f"{CLI}#ray-slo-plan"),
    "solve": (["{spec}"], f"{PAGE}#tables-to-solve"),
    "replay": (["none"], f"{CLI}#ray-slo-replay"),
    "new": (["9"], f"{CLI}#ray-slo-new"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_messages_of_commands_end_with_a_place_that_docs_shows(command, tmp_path):
    given, place = COMMANDS[command]
    spec = tmp_path / "spec.yaml"
    spec.write_text("num_workers: 0\n")
    result = CliRunner().invoke(app, [command.strip(), *(g.format(spec=spec) for g in given)])
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == f"See {place}", result.output
    shown = CliRunner().invoke(app, ["docs", place])
    assert shown.exit_code == 0, shown.output
