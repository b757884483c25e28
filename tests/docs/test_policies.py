"""The pages on policies say what the code does: arguments, defaults, simulated figures, reasons."""

import inspect
import re
from pathlib import Path

import pytest
import yaml

from benchmarks.harness.registry import PROGRAMS
from ray_slo.core import DropReason
from ray_slo.core.names import import_attr
from ray_slo.policies.registry import POLICIES
from ray_slo.serve.planner.plugin import PLANNERS
from ray_slo.simulation.spec import SimulationSpec

FOLDER = Path(__file__).parents[2] / "docs" / "policies"
SIMULATED = sorted(set(POLICIES) - {"pipeline"})


def text(name):
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def rows(name):
    """Cells of the page's tables, by the first one."""
    lines = re.findall(r"^\| (.+) \|$", text(name), re.MULTILINE)
    return {cells[0]: cells[1:] for cells in (line.split(" | ") for line in lines)}


def test_a_page_per_policy():
    assert {p.stem for p in FOLDER.glob("*.md")} == {*POLICIES, "composed", "index", "planners"}
    for name in POLICIES:
        assert text(name).startswith(f"# `{name}`\n")
        assert f"({name}.md)" in text("index")


@pytest.mark.parametrize("name", POLICIES)
def test_every_argument_is_there_with_its_default(name):
    found = rows(name)
    for parameter in inspect.signature(import_attr(POLICIES[name])).parameters.values():
        default = found[f"`{parameter.name}`"][0]
        if parameter.default is parameter.empty:
            assert default == "required"
        else:
            said = str(parameter.default)
            quoted = f'"{said}"' if isinstance(parameter.default, str) else said
            assert default == f"`{quoted}`", parameter.name


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
def test_the_figures_are_what_the_simulation_gives(name):
    (spec,) = re.findall(rf'```yaml title="{name}\.yaml"\n(.*?)```', text(name), re.DOTALL)
    figures = {k: v for k, v in rows(name).items() if k.startswith("`policy: {")}
    assert f"{{name: {name}" in next(iter(figures)) and len(figures) > 1
    for policy, said in figures.items():
        document = yaml.safe_load(spec) | yaml.safe_load(policy.strip("`"))
        got = SimulationSpec.model_validate(document).run().summary()
        want = [f"{100 * got['bad_rate']:.1f} %", f"{got['batch_size_mean']:.1f}"]
        want += [f"{got['accuracy']:.1f} %" for _ in said[2:]]
        assert said == want, policy


def test_reasons_and_programs():
    for reason in DropReason:
        assert f"`{reason.value}`" in text("index")
    for path in FOLDER.glob("*.md"):
        page = path.read_text(encoding="utf-8")
        systems = "symphony|shepherd|ramsis|loki|kairos|live"
        named = set(re.findall(rf"`((?:{systems})-[a-z0-9]+)`", page))
        assert named <= set(PROGRAMS), path.name
        if path.stem in POLICIES:
            limits = " ".join(page.partition("## Limits")[2].split())
            assert any(re.search(rf"[` ]{name}`", limits) for name in PROGRAMS), path.name


def test_every_planner_is_named():
    planners = text("planners")
    for name in PLANNERS:
        assert f"`{name}`" in planners
    for module in (FOLDER.parents[1] / "ray_slo" / "planning").glob("*.py"):
        if "\ndef plan(" in module.read_text(encoding="utf-8"):
            assert module.stem in planners
