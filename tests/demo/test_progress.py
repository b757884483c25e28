"""The progress bar and the time that is left."""

import io

import pytest
from rich.console import Console

from ray_slo.demo.progress import Steps, shown

EXPECTED = {"one": 10.0, "two": 100.0, "three": 50.0}


def test_time_left():
    now = [0.0]
    steps = Steps(EXPECTED, lambda: now[0])
    assert (steps.total_s, steps.done_s, steps.left) == (160, 0, "about 2.7 min left")
    steps.begin("one")
    now[0] = 4.0
    assert steps.done_s == 4
    now[0] = 30.0
    assert steps.done_s == 10  # a step that takes too long stands still
    steps.begin("three")
    assert steps.done_s == 110 and steps.left == "about 50 s left"
    now[0] += 49.5
    assert steps.left == "nearly done"
    steps.end()
    assert steps.done_s == 160


def test_an_unknown_step_is_refused():
    with pytest.raises(ValueError, match="four"):
        Steps(EXPECTED).begin("four")


@pytest.mark.parametrize("terminal", [True, False])
def test_text_is_printed_on_a_terminal_and_elsewhere(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80)
    with shown(console, EXPECTED) as bar:
        bar.step("one", "the first step")
        bar.print("a line")
        bar.step("three")
    assert "a line" in out.getvalue()
    assert ("left" in out.getvalue()) == terminal
    if not terminal:  # a log shows what takes so long
        assert out.getvalue().split("\n")[:3] == ["the first step", "a line", "three"]
