"""The demo's table, page and options; and one short run of it."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import ray_slo.demo.__main__ as program
from ray_slo.cli import app
from ray_slo.cli.report_html import Page, Section, Table
from ray_slo.demo import report
from ray_slo.demo.calibrate import Calibration
from ray_slo.demo.digits import serve
from ray_slo.demo.stream import GIVEN_UP_S, PARTS
from ray_slo.demo.systems import SYSTEMS, choose
from tests.demo.made_up import HELD, SETTINGS, figures, found


class Balance(HTMLParser):
    """Every tag that opens closes."""

    VOID = ("meta", "br", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        pass

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("absent", "said"),
    [
        (["torch"], "torch is not installed"),
        (["torch", "sklearn"], "torch and scikit-learn are not installed"),
        (["torch", "sklearn", "PIL"], "torch, scikit-learn and Pillow are not installed"),
    ],
)
def test_packages_that_are_missing_are_named(monkeypatch, absent, said) -> None:
    monkeypatch.setattr(program, "find_spec", lambda name: None if name in absent else ...)
    shown = CliRunner().invoke(app, ["demo", "--quick"])
    assert shown.exit_code == 2
    assert shown.stderr.startswith(f"Error: {said}. ")
    assert "pip install 'ray-slo[digits]'" in shown.stderr


@pytest.mark.parametrize(
    ("config", "first"), [("digits.yaml", "make serve "), ("absent", "ray-slo new my-model ")]
)
def test_the_next_steps_are_possible_where_it_ran(config, first, tmp_path, monkeypatch) -> None:
    """A wheel has no Makefile and no configs."""
    (tmp_path / "digits.yaml").write_text("")
    monkeypatch.setattr(serve, "CONFIG", tmp_path / config)
    told = program._next_steps(Calibration(SETTINGS, HELD, HELD))
    assert told.startswith(first)
    assert ("8000" in told) == (config == "digits.yaml")


def test_report_is_one_page_with_every_system_and_no_links_outside(tmp_path) -> None:
    made = found()
    path = report.write(tmp_path, made, "make serve")
    html = path.read_text(encoding="utf-8")
    parser = Balance()
    parser.feed(html)
    assert parser.open == []
    for system in SYSTEMS:
        assert html.count(f"<td>{system.name}</td>") >= len(PARTS)
    assert html.count('<tr class="strong">') == len(PARTS) * sum(s.ours for s in SYSTEMS) + 1
    assert "a &lt;test&gt; machine" in html
    assert html.count("<svg") == 3  # the stream, accuracy, replicas
    assert "currentColor" in html
    for sentence in (*made.conclusions, made.accuracy):
        assert sentence.replace("'", "&#39;") in html
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert not re.search(r'(src|href)="(?!#)', html)
    svg = (tmp_path / "demo.svg").read_text()
    assert "@ray_slo.deployment" in svg and "burst" in svg and "<dc:date>" not in svg
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_without_extras_and_of_one_system() -> None:
    made = found()
    made.models, made.following = (), None
    made.results = {s: r for s, r in made.results.items() if s.key == "batch"}
    html = report.page(made, "").render()
    assert "follow the load?" not in html and html.count("<svg") == 1


def test_figures_are_plain_and_whole() -> None:
    made = found()
    told = json.loads(json.dumps(report.figures(made)))
    assert set(told["parts"]) == {system.key for system in SYSTEMS}
    assert set(told["parts"]["tuned"]) == set(PARTS)
    assert len(told["conclusions"]) == 5 and not told["disturbed"]
    assert told["following"]["workers"][0] == [0.0, 1]


def test_cells() -> None:
    assert report.cells("x", figures(12.34, 0.5)) == (
        *("x", "12.3", "6.17", "50 %", "100", "200", "98.0 %"),
    )
    assert report.milliseconds(1e3 * GIVEN_UP_S) == "> 10000"
    assert report.milliseconds(None) == "–"


def test_page_escapes_text() -> None:
    page = Page("<t>", "a & b", [], [Section("h", ["<p>"], Table(["c"], [["<i>"]]), code="<b>")])
    html = page.render()
    assert "<title>&lt;t&gt;</title>" in html
    assert "&lt;i&gt;" in html
    assert "<pre>&lt;b&gt;</pre>" in html


def test_systems_are_chosen_by_key_in_order() -> None:
    assert choose(None) == list(SYSTEMS)
    assert [s.key for s in choose(["deployment", "tuned"])] == ["tuned", "deployment"]
    with pytest.raises(ValueError, match="tuned, batch, deployment"):
        choose(["fast"])


def test_the_server_is_told_nine_tenths_of_the_slo() -> None:
    assert SETTINGS.server_slo_ms == 540.0


def options(tmp_path, **changes):
    from ray_slo.demo.__main__ import Options

    usual = {
        **{"out": tmp_path, "variant": "digits-xl", "systems": None, "duration_s": None},
        **{"rate": None, "slo_ms": None, "wait_ms": None, "replicas": 2, "seed": 0},
        **{"extras": True, "quick": False},
    }
    return Options(**(usual | changes))


def test_options_must_fit_together(tmp_path) -> None:
    from ray_slo.demo.__main__ import run

    quiet = SimpleNamespace(print=lambda *_a, **_k: None)
    with pytest.raises(ValueError, match="--rate needs --slo-ms and --wait-ms"):
        run(quiet, options(tmp_path, rate=10.0))


def test_networks_are_those_up_to_the_one_asked_for(tmp_path) -> None:
    assert options(tmp_path).networks == ("digits-xs", "digits-s", "digits-l", "digits-xl")
    assert options(tmp_path, variant="digits-m").networks == ("digits-xs", "digits-s", "digits-m")
    assert options(tmp_path, variant="digits-xs").networks == ("digits-xs",)
    with pytest.raises(ValueError, match="variant: got 'digits-xxl', wanted one of digits-xs"):
        options(tmp_path, variant="digits-xxl").networks  # noqa: B018


def test_the_whole_demo_is_planned_for_eight_minutes_and_the_quick_one_for_two(tmp_path) -> None:
    assert sum(options(tmp_path).steps(list(SYSTEMS)).values()) < 8 * 60
    quick = options(tmp_path, quick=True, extras=False)
    assert sum(quick.steps(list(SYSTEMS)).values()) < 2 * 60
    assert quick.stream_s == 8 and options(tmp_path, duration_s=5.0).stream_s == 5
    assert 0 < options(tmp_path, duration_s=5.0).warm_up_s < 1


def test_screen_table_fits_80_columns() -> None:
    from rich.console import Console

    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.screen_table(found().sums, "digits"))
    text = console.export_text()
    assert "…" not in text
    for name in (*PARTS, *(system.name for system in SYSTEMS)):
        assert name in text
