"""The sections that messages name exist, and list the fields that the message is about."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from ray_slo.core.explain import validated
from ray_slo.core.pages import PAGE, SECTIONS, anchor_of
from ray_slo.serve import build_app
from ray_slo.serve.config.app import AppConfig
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
