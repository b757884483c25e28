"""docs/planning-capacity.md: the configs begin with the commands that it shows."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planning-capacity.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [shlex.split(code) for language, code in BLOCKS if language == "sh"]


@pytest.mark.parametrize("command", COMMANDS[:-1], ids=" ".join)
def test_configs_begin_with_the_commands(command):
    # tests/docs holds that the commands do what they say.
    head = (ROOT / command[2]).read_text().split("\n\n")[0].splitlines()
    assert f"# {' '.join(command)}" in head[:2]
