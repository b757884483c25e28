from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from ray_slo.cli.report_html import Page, Section, Table
from ray_slo.core.profiles import LatencyProfile
from ray_slo.demo import report
from ray_slo.demo.calibrate import Calibration, _round, poisson
from ray_slo.demo.systems import SYSTEMS, Settings, choose
from ray_slo.load.report import LoadResult, Sample
from ray_slo.load.workload import Payloads

SETTINGS = Settings("digits-xl", 2, 32, slo_s=0.6, tuned_wait_s=0.15)


def result(latency_s: float) -> LoadResult:
    """A run in which every request takes this long, give or take."""
    payloads = Payloads([b"x"], ["3"])
    workload = poisson(payloads, 50, 4, warmup_s=1, seed=0)
    noise = np.random.default_rng(0).uniform(0.8, 1.2, len(workload))
    samples = [
        Sample(
            t, t + latency_s * f, "answered", 200, None, {"x-slo-batch-size": "4"}, b'{"label": 3}'
        )
        for t, f in zip(workload.times_s, noise, strict=True)
    ]
    return LoadResult.from_samples(samples, workload, payloads, slo_s=0.6, cpu_s=0.1)


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


def test_report_is_one_page_with_every_system_and_no_links_outside(tmp_path) -> None:
    results = {system: result(0.2 if system.ours else 0.7) for system in SYSTEMS}
    calibration = Calibration(SETTINGS, 90.0, 70.0, [{"rate": 70, "wait_s": 0.1, "bad_rate": 0.5}])
    path = report.write(
        tmp_path / "new" / "report.html",
        results,
        calibration,
        {"digits-xl": LatencyProfile.linear(0.005, 0.04, 32)},
        {"digits-xl": 0.99},
        {"hardware": "a <test> machine"},
        "make serve",
    )
    html = path.read_text(encoding="utf-8")
    parser = Balance()
    parser.feed(html)
    assert parser.open == []
    for system in SYSTEMS:
        assert f"<td>{system.name}</td>" in html
    assert html.count('<tr class="strong">') == sum(s.ours for s in SYSTEMS)
    assert "a &lt;test&gt; machine" in html
    assert html.count("<svg") == 3
    assert "currentColor" in html
    assert "prefers-color-scheme: dark" in html
    # Self-contained: nothing is loaded from anywhere (namespaces are only names).
    assert not re.search(r"<(link|script|img|iframe)\b|@import|src=", html)
    assert not re.search(r'(?<!xlink:)href="http', html)
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))


def test_table_cells_are_the_summary() -> None:
    ours = next(system for system in SYSTEMS if system.ours)
    name, offered, goodput, bad, p50, *_, batch, accuracy = report.cells(ours, result(0.2))
    assert name == ours.name
    assert offered == goodput
    assert (bad, batch, accuracy) == ("0.0 %", "4.00", "100.0 %")
    assert 190 < float(p50) < 210
    slow = report.cells(ours, result(2.0))
    assert slow[2:4] == ("0", "100.0 %")
    assert slow[-1] == "–"  # nobody was in time: no accuracy to speak of


def test_page_escapes_text() -> None:
    page = Page("<t>", "a & b", [], [Section("h", ["<p>"], Table(["c"], [["<i>"]]), code="<b>")])
    html = page.render()
    assert "<title>&lt;t&gt;</title>" in html
    assert "&lt;i&gt;" in html
    assert "<pre>&lt;b&gt;</pre>" in html


def test_systems_are_chosen_by_key_in_order() -> None:
    assert choose(None) == list(SYSTEMS)
    assert [s.key for s in choose(["deployment", "tuned"])] == ["tuned", "deployment"]
    with pytest.raises(ValueError, match="default, blocking, tuned, batch, deployment"):
        choose(["fast"])


def test_slo_is_rounded_up_to_two_digits() -> None:
    assert [_round(s) for s in (0.1234, 0.6, 1.01)] == pytest.approx([0.13, 0.6, 1.1])
    assert SETTINGS.server_slo_ms == 540.0


def test_options_must_fit_together(tmp_path) -> None:
    from ray_slo.demo.__main__ import Options, run

    quiet = SimpleNamespace(print=lambda *_a, **_k: None)
    with pytest.raises(ValueError, match="--rate goes with"):
        run(quiet, Options(tmp_path, None, None, 5, 10.0, None, None, 2, 0, True))


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_demo_runs_and_all_answer_rightly(tmp_path) -> None:
    """Far below capacity, so that it holds on a busy machine."""
    args = "--quick --json --variant digits-s --rate 8 --slo-ms 3000 --wait-ms 50 --duration-s 5"
    done = subprocess.run(
        [sys.executable, "-m", "ray_slo.demo", *args.split(), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout)
    assert set(figures["systems"]) == {system.key for system in SYSTEMS}
    for key, summary in figures["systems"].items():
        assert summary["status"]["error"] == 0, key
        assert summary["accuracy"] > 0.85, key
        assert summary["mean_batch"] >= 1, key
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "workload.npz").exists()
    assert (tmp_path / "deployment" / "requests.csv").exists()


def test_screen_table_fits_80_columns() -> None:
    from rich.console import Console

    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.screen_table({s: result(0.2) for s in SYSTEMS}, "digits"))
    text = console.export_text()
    assert "…" not in text
    for system in SYSTEMS:
        assert system.name in text
