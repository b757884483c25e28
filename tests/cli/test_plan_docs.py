"""docs/planning-capacity.md: the configs begin with the commands that it shows."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planning-capacity.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [shlex.split(code) for language, code in BLOCKS if language == "sh"]
# What serves begins with the command that serves it.
ON_SPECS = [command for command in COMMANDS[:-1] if command[1] == "plan"]


@pytest.mark.parametrize("command", ON_SPECS, ids=" ".join)
def test_configs_begin_with_the_commands(command):
    # tests/docs holds that the commands do what they say.
    head = (ROOT / command[2]).read_text().split("\n\n")[0].splitlines()
    assert f"# {' '.join(command)}" in head[:2]
