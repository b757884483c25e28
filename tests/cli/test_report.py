"""`ray-slo report`: what the page says, and what a browser makes of it."""

import asyncio
import json
import re
import shutil
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from benchmarks.loki import terms as loki
from ray_slo.cli import app, report_bench, report_run
from ray_slo.cli.report import load, page
from ray_slo.cli.report_run import of_report
from ray_slo.core import (
    Assigned,
    Cluster,
    DispatchDelay,
    LatencyProfile,
    Model,
    Variant,
    Worker,
)
from ray_slo.load.report import LoadResult
from ray_slo.planning.brains.auto import AutoBrain
from ray_slo.policies import make_policy
from ray_slo.record.encode import Lines
from ray_slo.record.rows import Recording, Start
from ray_slo.simulation import Trace, WorkerEvent, simulate, simulate_application
from ray_slo.simulation.application import auto_brain
from ray_slo.simulation.report import Report
from ray_slo.simulation.workloads import Workload
from tests.cli.browser import CHROMIUM, chromium

EVIL = "</script><b>cats"


def variant(name, scale, accuracy):
    return Variant(name, {"cpu": LatencyProfile.linear(0.002 * scale, 0.01 * scale, 32)}, accuracy)


CLUSTER = Cluster.of(
    [
        Model("dogs", 0.06, (variant("d-small", 1, 70.0), variant("d-large", 2, 80.0))),
        Model(EVIL, 0.1, (variant("c-only", 1.5, 90.0),)),
    ],
    [
        Worker(
            "w0", "cpu", frozenset({"d-small", "d-large", "c-only"}), (Assigned("d-small", 8, 9),)
        ),
        Worker("w1", "cpu", frozenset({"d-small", "d-large", "c-only"})),
    ],
    DispatchDelay(0.001),
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder of each kind of source, of the same run."""
    folder = tmp_path_factory.mktemp("sources")
    lines = Lines(folder / "log", "20260101-zoo", Start.of("price", {}, wall_at=1e9))
    report = simulate(
        Recording(make_policy("price"), lines),
        CLUSTER,
        Workload.poisson(500),
        duration_s=3.0,
        latency_noise=0.2,
        worker_events=[WorkerEvent(1.0, "w1", "leave"), WorkerEvent(1.5, "w1", "join")],
    )
    lines.close()
    (folder / "sim").mkdir()
    report.save(folder / "sim" / "report.npz")
    frame = report.requests
    latency = frame["latency_s"].fillna(1.0).to_numpy()
    requests = pd.DataFrame(
        {
            "intended_s": frame["arrival_s"],
            "sent_s": frame["arrival_s"] + 0.002,
            "done_s": frame["arrival_s"] + latency,
            "latency_s": latency,
            "measured": frame["arrival_s"] > 0.5,
            "status": frame["outcome"]
            .map({"good": "ok", "late": "late", "dropped": "refused", "pending": "error"})
            .astype(str),
            "error": np.where(frame["outcome"] == "dropped", "503: would_miss", None),
            "correct": pd.array([None] * len(frame), dtype="boolean"),
            "model": frame["model"].astype(str),
            "variant": frame["variant"].astype(object),
            "accuracy": 75.0,
            "batch_size": 4.0,
            "queue_s": 0.01,
            "exec_s": 0.02,
        }
    )
    (folder / "bench").mkdir()
    requests.to_csv(folder / "bench" / "requests.csv", index=False)
    summary = LoadResult(requests, 0.1, 3.0, 0.5, 0.1).summary
    (folder / "bench" / "summary.json").write_text(json.dumps(summary))
    return folder, report


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The log of a simulated pipeline whose demand rises, and whose planner fails once."""
    folder = tmp_path_factory.mktemp("planned")
    tasks = (
        loki.Task("find", (loki.Variant("f", 90.0, STEP, {"name": 1.0}),)),
        loki.Task("name", (loki.Variant("n", 80.0, STEP),), "find"),
    )
    asked = iter(range(99))

    class Fails(AutoBrain):
        @property
        def solve(self):
            if next(asked) == 1:
                raise RuntimeError("no <b>licence")
            return super().solve

    simulate_application(
        loki.as_auto(loki.Problem(tasks, demand=20.0, workers=4, slo_s=0.4)),
        {"find": Workload(arrivals=Trace(rates=[20, 150, 150, 150], interval_s=2.0))},
        policy="pipeline",
        planner=partial(auto_brain, brain=Fails),
        interval_s=3.0,
        solve_s=0.25,
        load_s=0.3,
        log=folder,
    )
    return folder


STEP = LatencyProfile.linear(0.01, 0.02, 8)


def headings(html):
    return re.findall(r"<h2>(.*?)</h2>", html)


CHARTS = ["Goodput and violations", "Latency against the SLO", "Batch sizes"]
CHARTS += ["Variants and accuracy"]
WORDS = ["The worst requests", "By model", "Why requests were given up"]
BATCHES = ["What every worker ran", "Prediction error"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "log",
            [*CHARTS, *BATCHES, *WORDS, "What the policy was told of the cluster"],
        ),
        (
            "sim",
            [*CHARTS, *BATCHES, "The worst requests", "By model", "Why requests were given up"],
        ),
        ("bench", [*CHARTS, "The worst requests", "Errors"]),
    ],
)
def test_one_page_from_any_source(sources, tmp_path, name, wanted):
    folder, report = sources
    out = tmp_path / "new" / "page.html"
    shown = CliRunner().invoke(app, ["report", str(folder / name), "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith(f"wrote {out}")
    html = out.read_text()
    assert headings(html) == wanted
    assert not re.search(r'(src|href)="(?!#)|@import|url\((?!#)', html)  # nothing to fetch
    assert EVIL not in html
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])
    assert data["models"] == (["dogs", EVIL] if name != "bench" else sorted(["dogs", EVIL]))
    bad = [o["bad"] for o in data["outcomes"]]
    violations = sum(bad[o] for o in data["requests"]["outcome"])
    assert violations == report.count() - report.count("good") > 0
    assert len(data["requests"]["t"]) == report.count()


def test_figures_and_words(sources):
    folder, report = sources
    source = load(folder / "log")
    facts = dict(source.facts)
    assert facts["policy"] == "price"
    assert facts["since"] == "2001-09-09 01:46 UTC"
    assert facts["requests"] == f"{report.count():,}"
    (changes,) = [t.rows for heading, _, t in source.tables if "told" in heading]
    said = [words for _, words in changes]
    assert "the plan assigns d-small to w0, in batches of at most 8 for 9 requests/s" in said[0]
    assert said[1] == "w1 left"
    assert said[2].startswith("w1 (cpu) joined with c-only, d-large, d-small")
    drops = next(t.rows for heading, _, t in source.tables if heading.startswith("Why"))
    assert sum(int(n) for _, n, _ in drops) == report.count("dropped")
    assert len(source.worst) == 10
    assert {d.tags["outcome"] for d in source.worst} >= {"late", "dropped"}
    late = next(d for d in source.worst if d.tags["outcome"] == "late")
    assert any(re.search(r"; worth -?\d+(\.\d+)? to the policy", step) for step in late.steps)


def test_decisions_of_the_planner(planned):
    source = load(planned)
    assert ("planner", "Fails") in source.facts
    html = page(source).render()
    assert "Planner decisions" in headings(html)
    assert "no <b>" not in html
    table = source.plans
    first, failed, *_ = table.rows
    assert first[1:5] == (
        *("first plan", "20.0/s", "2 worker"),
        "worker: – → 2 workers\nf: 0 → 1 workers\nn: 0 → 1 workers",
    )
    assert failed[-1] == "planning failed: RuntimeError: no <b>licence. The last plan holds."
    assert table.kinds[:2] == ["changed", "failed"]
    assert set(table.kinds) <= {"changed", "failed", ""}
    marks = source.data["plans"]
    assert len(marks["t"]) == sum(map(bool, table.kinds)) < len(table.rows)
    assert marks["failed"].count(True) == 1
    rise = marks["words"][2]
    assert rise.startswith("period: worker: 2 → ")
    asked = [t for t, row in zip(table.times, table.rows, strict=True) if row[4]][1]
    assert marks["t"][2] == pytest.approx(asked + 0.25, abs=0.01)


def test_what_auto_ran_and_why(tmp_path):
    model = Model("m", 0.1, (Variant("m", {"default": LatencyProfile.linear(0.002, 0.01, 16)}),))
    late = {"policy": "timeout", "kwargs": {"timeout_ms": 95}}  # the first guess is bad
    kwargs = {"candidates": [late, "eager"]}
    lines = Lines(tmp_path, "s", Start.of("auto", kwargs))
    recording = Recording(make_policy("auto", kwargs), lines)
    simulate(recording, Cluster.uniform([model], 2), Workload.poisson(400), duration_s=3.0)
    lines.close()
    source = load(tmp_path)
    (table,) = (table for title, _, table in source.tables if title == "What auto ran")
    (at, first, why), *_, (_, last, _) = table.rows
    assert (at, why) == ("0.000", "first guess for this application")
    assert first.startswith("timeout") and last.startswith("eager")
    assert "What auto ran" in headings(page(source).render())


def test_a_planner_whose_clock_nobody_compared_is_listed_by_its_own(planned, tmp_path):
    folder = tmp_path / "log"
    shutil.copytree(planned, folder)
    (file,) = (folder / "_plans").iterdir()
    table = pq.read_table(file)
    details = [d and d.replace("simulated-find", "another") for d in table["detail"].to_pylist()]
    wall = pa.array([1e9] * len(table))
    table = table.set_column(table.schema.get_field_index("detail"), "detail", pa.array(details))
    pq.write_table(table.set_column(table.schema.get_field_index("wall_at"), "wall_at", wall), file)
    source = load(folder)
    assert any("ran on another machine" in note for note in source.notes)
    assert source.plans.rows[0][0] == "2001-09-09 01:46:40"
    assert "plans" not in source.data
    shutil.rmtree(folder / "_plans")
    assert load(folder).plans is None
    assert "Planner decisions" not in page(load(folder)).render()


def hand_made(**requests):
    """One worker, one model with an SLO of 100 ms; one batch of two, 20 ms longer than said."""
    n = len(requests["batch"])
    columns = {"model": [0] * n, "drop_reason": [-1] * n, "dropped_s": [np.nan] * n, **requests}
    batches = {"worker": [0], "variant": [0], "size": [2], "status": [0]}
    times = {"dispatched_s": [1.04], "predicted_start_s": [1.05], "predicted_finish_s": [1.09]}
    times |= {"started_s": [1.06], "finished_s": [1.12]}
    meta = {"duration_s": 2.0, "warmup_s": 0.0, "seed": 0, "policy": "by hand", "models": ["m"]}
    meta |= {"slo_s": {"m": 0.1}, "variants": ["v"], "accuracy": {"v": None}, "workers": ["w0"]}
    return Report(
        meta,
        {k: np.array(v) for k, v in columns.items()},
        {k: np.array(v) for k, v in {**batches, **times}.items()},
    )


def test_the_worst_are_explained_step_by_step():
    report = hand_made(
        arrival_s=[1.0, 1.03, 1.07, 1.5],
        deadline_s=[1.1, 1.13, 1.17, 1.6],
        batch=[0, 0, -1, -1],
        drop_reason=[-1, -1, 1, -1],
        dropped_s=[np.nan, np.nan, 1.13, np.nan],
    )
    source = of_report(report, "test")
    late, dropped, pending = source.worst
    assert late.head == "m at 1.000 s: answered after 120.0 ms, 20.0 ms late"
    assert list(late.steps) == [
        "arrived at 1.000 s for m, to be answered within 100 ms; requests waiting before "
        "it: 0, busy workers: 0",
        "+40.0 ms: sent to w0 with one other as v; predicted to end at +90.0 ms, 10.0 ms before "
        "its deadline",
        "+60.0 ms: the batch began (10.0 ms later than predicted)",
        "+120.0 ms: done; it ran 60.0 ms, 20.0 ms longer than predicted",
        "missed by 20.0 ms. The longest part was running (60.0 ms)",
    ]
    assert dropped.head == "m at 1.070 s: given up after 60.0 ms (shed)"
    assert dropped.steps[0].endswith("requests waiting before it: 0, busy workers: 1")
    assert dropped.steps[1] == "+50.0 ms: w0 was the first of these workers to be free"
    assert dropped.steps[2].startswith("+60.0 ms: given up (shed): ")
    assert pending.head == "m at 1.500 s: never answered"


def test_without_a_miss_the_tightest_are_shown():
    report = hand_made(arrival_s=[1.0, 1.03], deadline_s=[2.0, 1.5], batch=[0, 0])
    source = of_report(report, "test")
    assert [d.tags["outcome"] for d in source.worst] == ["good", "good"]
    assert source.worst[0].head.endswith("380.0 ms to spare")
    assert "No request was missed" in page(source).render()


def test_long_runs_show_their_end(sources, monkeypatch):
    for module in (report_run, report_bench):
        monkeypatch.setattr(module, "MOST_REQUESTS", 100)
    folder, report = sources
    for name in ("sim", "bench"):
        source = load(folder / name)
        assert len(source.data["requests"]["t"]) == 100
        assert any("Charts show the last 100 of" in note for note in source.notes)
    batches = load(folder / "sim").data["batches"]
    used = load(folder / "sim").data["requests"]["batch"]
    assert max(used) == len(batches["size"]) - 1
    assert len(batches["size"]) < len(report.batches)


def test_what_is_no_source(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "requests.csv").write_text("a\n1\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.npz").write_text("hello")
    for what, said in (
        (tmp_path / "none", "No such file or folder"),
        (tmp_path / "empty", "neither a decision log"),
        (tmp_path, "not a bench run: slo_ms: required"),
        (tmp_path / "requests.csv", "no decision log, or cut short"),
        (tmp_path / "text.npz", "not a report file"),
    ):
        shown = CliRunner().invoke(app, ["report", str(what), "--out", str(tmp_path / "x.html")])
        assert shown.exit_code == 2
        assert said in " ".join(shown.output.split())
    assert not (tmp_path / "x.html").exists()


# -- in a browser ----------------------------------------------------------------------------

DRAWN = """
[...document.querySelectorAll('[data-chart]')].map(figure => {
  const canvas = figure.querySelector('canvas');
  if (!canvas) return [figure.dataset.chart, figure.querySelectorAll('svg path').length];
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let inked = 0;
  for (let i = 3; i < pixels.length; i += 4) inked += pixels[i] > 0;
  return ['timeline', inked];
})
"""
COUNT = "+document.querySelector('#filter output').value.replace(/,/g, '').split(' ')[0]"
PLACE = """(() => {{
  const box = document.querySelector('{}');
  box.scrollIntoView({{block: 'center'}});
  const r = box.getBoundingClientRect();
  return [r.left, r.top, r.width, r.height];
}})()"""


def choose(name, value):
    return (
        f"(() => {{ const box = document.querySelector('select[name={name}]'); box.value = {value};"
        " box.dispatchEvent(new Event('change')); })()"
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (package chromium)")
def test_in_a_browser(sources, planned, tmp_path):
    folder, report = sources
    for name in ("log", "bench"):
        page(load(folder / name)).write(tmp_path / f"{name}.html")
    plans = load(planned)
    page(plans).write(tmp_path / "plans.html")
    frame = report.requests

    async def look():
        async with chromium(tmp_path / "profile") as tab:
            log = await tab()
            await log.open(tmp_path / "log.html")
            drawn = dict(await log.evaluate(DRAWN))
            assert list(drawn) == ["goodput", "latency", "sizes", "mix", "timeline", "errors"]
            assert min(drawn.values()) >= 1
            assert drawn["timeline"] > 1000
            assert await log.evaluate(COUNT) == len(frame)

            # The filter.
            await log.evaluate(choose("model", 0))
            assert await log.evaluate(COUNT) == (frame["model"] == "dogs").sum()
            hidden = "[...document.querySelectorAll('details')].filter(d => d.hidden).length"
            worst = load(folder / "log").worst
            assert await log.evaluate(hidden) == sum(d.tags["model"] != "dogs" for d in worst)
            bad = frame["outcome"] != "good"
            await log.evaluate(choose("outcome", 4))  # all violations
            assert await log.evaluate(COUNT) == ((frame["model"] == "dogs") & bad).sum()
            await log.evaluate("document.querySelector('#filter button').click()")
            assert await log.evaluate(COUNT) == len(frame)

            # A time, chosen by dragging.
            x, y, width, height = await log.evaluate(PLACE.format("[data-chart=goodput] svg"))
            y += height / 2
            await log.mouse(
                ("pressed", x + width / 4, y),
                ("moved", x + width / 3, y),
                ("moved", x + width / 2, y),
                ("released", x + width / 2, y),
            )
            part = await log.evaluate(COUNT)
            assert 0.15 < part / len(frame) < 0.35

            # The timeline is zoomed, moved, and says what is under the pointer.
            view = "Object.values({...document.querySelector('canvas').dataset}).map(Number)"
            shown, begin, end = await log.evaluate(view)
            assert end - begin < 1.5
            await log.evaluate("document.querySelector('[title=\"Zoom in\"]').click()")
            fewer, closer, _ = await log.evaluate(view)
            assert fewer < shown
            assert closer > begin
            await log.evaluate("document.querySelector('[title=Later]').click()")
            assert (await log.evaluate(view))[1] > closer
            x, y, width, _ = await log.evaluate(PLACE.format("canvas"))
            await log.mouse(("moved", x + width / 2, y + 10))
            said = "document.querySelector('[data-chart=timeline] .readout').textContent"
            assert (await log.evaluate(said)).startswith("w0: ")
            await log.screenshot(tmp_path / "log.png")

            dark = await tab()
            await dark.open(tmp_path / "log.html", dark=True)
            paper = "getComputedStyle(document.body).backgroundColor"
            assert await dark.evaluate(paper) != await log.evaluate(paper)
            phone = await tab()
            await phone.open(tmp_path / "log.html", width=360)
            assert await phone.evaluate("document.documentElement.scrollWidth") == 360
            bench = await tab()
            await bench.open(tmp_path / "bench.html")
            assert [name for name, _ in await bench.evaluate(DRAWN)] == list(drawn)[:4]
            assert min(n for _, n in await bench.evaluate(DRAWN)) >= 1
            assert await log.evaluate("document.querySelector('.search, .plan')") is None

            # A planner's decisions: marks, and a table that is searched.
            table = await tab()
            await table.open(tmp_path / "plans.html", dark=True)
            marks = "document.querySelectorAll('.plan{}').length"
            inside = [0 <= t <= plans.data["to"] for t in plans.data["plans"]["t"]]
            assert await table.evaluate(marks.format("")) == sum(inside) >= 2
            assert await table.evaluate(marks.format(".failed")) == 1
            left = "[...document.querySelectorAll('.cards tbody tr')].filter(r => !r.hidden).length"
            assert await table.evaluate(left) == len(plans.plans.rows)
            search = (
                "(() => {{ const box = document.querySelector('.search {}'); box.value = '{}';"
                " box.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"
            )
            await table.evaluate(search.format("input", "LICENCE"))
            assert await table.evaluate(left) == 1
            await table.evaluate(search.format("select", "changed"))
            assert await table.evaluate(left) == 0
            await table.evaluate(search.format("input", ""))
            assert await table.evaluate(left) == plans.plans.kinds.count("changed")
            await table.evaluate("document.querySelector('#filter button').click()")
            assert await table.evaluate(left) == len(plans.plans.rows)
            small = await tab()
            await small.open(tmp_path / "plans.html", width=360)
            assert await small.evaluate("document.documentElement.scrollWidth") == 360
            wide = (
                "Math.max(...[...document.querySelectorAll('.cards td')].map(c => c.scrollWidth))"
            )
            assert await small.evaluate(wide) < 360
            for seen in (log, dark, phone, bench, table, small):
                assert seen.problems == []
                assert [url.startswith("file://") for url in seen.fetched] == [True]

    asyncio.run(look())
    assert (tmp_path / "log.png").stat().st_size > 20_000
