"""The saved runs, and the page made from them."""

import json
import re

import pytest

from benchmarks.__main__ import main
from benchmarks.harness import results
from benchmarks.harness.page import PAGE, page
from benchmarks.harness.registry import PROGRAMS, Ask
from benchmarks.harness.results import CHANGED, NOT_COMPARED


def row(case="t · a", metric="m", ours=1.0, paper=None, peers=None):
    return {"case": case, "metric": metric, "unit": "ms", "ours": ours, "paper": paper,
            "peers": peers or {}}  # fmt: skip


ORIGIN = {"date": "2026-01-02", "commit": "abc", "code": "0f", "cores": 2, "python": "3.9.1"}


def body(name="symphony-fig5", quick=False, rows=None):
    return {"name": name, "source": "s", "quick": quick, "seed": 0, "rows": rows or [row()]}


@pytest.fixture
def no_marks(monkeypatch):
    """To read all code for the marks of the saved runs would take ten seconds."""
    monkeypatch.setattr("benchmarks.harness.page.age", lambda run, module: "")


def ageless(text):
    return re.sub(rf", (\*\*)?({CHANGED}|{NOT_COMPARED})(\*\*)?", "", text)


def test_the_page_in_the_repository_is_what_the_saved_runs_make(no_marks):
    """Whether code has changed since is left out: it may have changed after the page was made."""
    # Otherwise: python -m benchmarks page
    assert ageless(PAGE.read_text(encoding="utf-8")) == ageless(page())


def test_every_program_and_every_saved_run_is_on_the_page(no_marks):
    text = page()
    for name in PROGRAMS:
        assert f"\n### {name}\n" in text
        assert (f"benchmarks {name}`: no saved run" in text) == (results.load(name) is None)
    saved = {path.stem for path in results.FOLDER.glob("*.json")}
    assert saved and saved <= set(PROGRAMS)


def test_every_saved_run_is_whole():
    for path in results.FOLDER.glob("*.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        assert run["name"] == path.stem and run["rows"]
        assert {"source", "quick", "seed", "date"} <= set(run)
        for r in run["rows"]:
            assert set(r) == {"case", "metric", "unit", "ours", "paper", "peers"}


def test_whatever_is_asked_is_asked_of_a_row():
    for name, program in PROGRAMS.items():
        run = results.load(name)
        if run is None:
            continue
        missing = [ask for ask in program.asked if not ask.rows(run["rows"])]
        is_part = run["quick"] or run.get("options")
        assert not missing or is_part, f"{name}: no row for {missing}"


def test_what_is_not_met_has_a_reason():
    unexplained = [
        (name, ask.case, ask.metric)
        for name, program in PROGRAMS.items()
        if (run := results.load(name)) is not None
        for ask in program.asked
        if (found := ask.rows(run["rows"])) and not ask.met(found[0]["ours"]) and not ask.note
    ]
    assert not unexplained


def test_the_worst_of_the_rows_counts():
    rows = [row("x · a", ours=1.0), row("x · b", ours=3.0), row("y", ours=9.0), row("x · c")]
    rows[-1]["ours"] = None
    at_least, at_most = Ask("x*", "m", "≥", 2.0), Ask("x*", "m", "≤", 3.0)
    assert [r["ours"] for r in at_least.rows(rows)] == [1.0, 3.0] and not at_least.met(1.0)
    assert [r["ours"] for r in at_most.rows(rows)] == [3.0, 1.0] and at_most.met(3.0)
    assert not Ask("z", "m", "≥", 0.0).rows(rows)


def test_a_run_is_saved_with_where_it_ran_and_a_quick_one_replaces_no_full_one(tmp_path):
    path = results.save(body(rows=[row(ours=1 / 3)]), ORIGIN, 1.25, 2.0, folder=tmp_path)
    run = results.load("symphony-fig5", tmp_path)
    assert path == tmp_path / "symphony-fig5.json"
    assert run["rows"] == [row(ours=0.333333)]
    assert (run["cpu_s"], run["wall_s"]) == (1.2, 2.0)
    assert {k: run[k] for k in ORIGIN} == ORIGIN
    assert results.save(body(quick=True), ORIGIN, 0.1, 0.1, folder=tmp_path) is None
    assert results.load("symphony-fig5", tmp_path) == run
    assert results.save(body(rows=[row(ours=2)]), ORIGIN, 0.1, 0.1, folder=tmp_path)
    assert results.load("symphony-fig5", tmp_path)["rows"][0]["ours"] == 2


def test_a_page_of_one_run(tmp_path):
    rows = [row("t · a", ours=5, paper=4, peers={"Nexus": 3}), row("t · b|c", ours=None)]
    results.save(body(quick=True, rows=rows), ORIGIN, 1.0, 1.0, folder=tmp_path)
    text = page(tmp_path)
    assert "`python -m benchmarks symphony-fig5 --quick` · quick · seed 0" in text
    assert "|  | m (ms) |\n| --- | ---: |\n| a | 5<br>paper 4 |\n| b\\|c | – |\n" in text
    assert "m in the paper: Nexus 3." in text
    assert text.count("`: no saved run.") == len(PROGRAMS) - 1
    others = [p for name, p in PROGRAMS.items() if name != "symphony-fig5"]
    assert text.count(" | no saved run | – | none | ") == sum(len(p.asked) for p in others) > 0


def test_a_run_whose_code_has_changed_is_called_that(tmp_path):
    name = "symphony-fig6"
    program = PROGRAMS[name]

    def said(**of_run):
        run = results.origin(program.module) | {"commit": "abc"} | of_run
        results.save(body(name), run, 1.0, 1.0, folder=tmp_path)
        lines = page(tmp_path).splitlines()
        overview = next(line for line in lines if line.startswith(f"| [`{name}`]"))
        how = next(line for line in lines if line.startswith(f"`python -m benchmarks {name}` · "))
        return overview.split(" | ")[5], how.split(" · ")[4]

    assert said() == ("full", "commit abc")
    assert said(code="0f") == ("full, code changed since", "commit abc, **code changed since**")
    other = ("full, code not compared", "commit abc, **code not compared**")
    assert said(python="3.9.1") == other
    run = results.load(name, tmp_path)
    del run["code"]
    (tmp_path / f"{name}.json").write_text(json.dumps(run))
    assert other[0] in page(tmp_path)


def test_a_run_with_options_names_them(tmp_path):
    part = body() | {"options": "--mode haproxy"}
    results.save(part, ORIGIN, 1.0, 1.0, folder=tmp_path)
    assert "`python -m benchmarks symphony-fig5 --mode haproxy` · full" in page(tmp_path)


def test_long_tables_are_folded(tmp_path):
    results.save(body(rows=[row(f"t · {i}") for i in range(40)]), ORIGIN, 1.0, 1.0, folder=tmp_path)
    assert "<summary>t: 40 lines</summary>\n\n|" in page(tmp_path)


def test_front_door(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results.save, "__defaults__", (tmp_path,))
    monkeypatch.setattr("benchmarks.harness.page.write", lambda: tmp_path / "page.md")
    main(["symphony-fig5", "--quick", "--save"])
    assert (tmp_path / "symphony-fig5.json").exists()
    main(["page"])
    assert "page.md" in capsys.readouterr().out
