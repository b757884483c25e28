"""docs/planning-capacity.md: the configs begin with the commands that it shows."""

import re
import shlex
from pathlib import Path

import pytest

from ray_slo.core.documents import read_yaml
from ray_slo.simulation.sizing import PlanSpec, what_if

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planning-capacity.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [shlex.split(code) for language, code in BLOCKS if language == "sh"]


@pytest.mark.parametrize("command", COMMANDS[:-1], ids=" ".join)
def test_specs_and_changes_are_well_formed(command):
    _, plan, spec, *options = command
    assert plan == "plan"
    question = PlanSpec.model_validate(read_yaml(ROOT / spec)).build(ROOT / "configs")
    assert (ROOT / spec).read_text().startswith(f"# {' '.join(command)}\n")
    for option, change in zip(options[::2], options[1::2], strict=True):
        assert option == "--what-if"
        assert what_if(question, change) != question
