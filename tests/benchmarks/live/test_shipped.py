"""`python -m benchmarks shipped` without its runs: what it reads, and what it writes."""

import shutil

import pandas as pd
import pytest

from benchmarks.harness.results import load
from benchmarks.harness.rows import Row
from benchmarks.live.shipped import (
    FOLDER,
    OVERLOAD,
    README,
    STEPS,
    Bench,
    _is_loopback,
    figures_of,
    needs,
    run,
    shipped,
    table,
    write_figures,
)
from ray_slo.load.report import LoadResult


def figures(case, load):
    rows = [
        Row(case, f"{what} {load}".strip(), unit, value)
        for what, unit, value in (
            ("rate", "1/s", 5.0),
            ("in time", "", 18.0),
            ("late", "", 1.0),
            ("refused", "", 1.0),
            ("other", "", 0.0),
            ("p95", "ms", 123.4),
            ("accuracy", "%", 98.7),
        )
    ]
    return rows


def a_run(name):
    return [
        *figures(name, "at its rate"),
        *figures(name, "at 3 ×"),
        Row(name, "ready", "s", 12.3),
        Row(name, "memory", "MB", 812.0),
        Row(name, "elsewhere", "", 0.0),
    ]


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_every_file_says_how_to_load_it(path):
    bench = Bench.of(path)
    assert bench.url.startswith("http://127.0.0.1:8000/")
    assert bench.rate > 0 and bench.slo_ms > 0
    assert bench.payload


def test_a_rising_load_is_of_a_file_that_exists():
    assert set(STEPS) <= {path.stem for path in shipped()}
    assert all(list(rates) == sorted(rates) for rates in STEPS.values())


def test_another_name_is_refused_with_the_valid_ones():
    with pytest.raises(SystemExit, match=r"no file 'nothing'; choose one of .*digits"):
        run(only="nothing")


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("0100007F:1F40", True),  # 127.0.0.1, as Linux writes it on x86 and ARM
        ("0101007F:1F40", True),
        ("00000000:1F40", False),
        ("020000C0:1F40", False),
        ("00000000000000000000000001000000:1F40", True),  # ::1
        ("00000000000000000000000000000000:1F40", False),
        ("0000000000000000FFFF00000100007F:1F40", True),
        ("0000000000000000FFFF0000020000C0:1F40", False),
    ],
)
def test_loopback_as_the_kernel_writes_it(address, loopback):
    assert _is_loopback(address) is loopback


def test_what_became_of_requests():
    """A late one and one that failed are not in time, and not in the accuracy."""
    requests = pd.DataFrame(
        {
            "status": ["ok", "ok", "late", "expired", "error"],
            "error": [None, None, None, "queue full", "broken"],
            "accuracy": [80.0, 90.0, 10.0, None, None],
            "latency_s": [0.04, 0.04, 0.04, 0.0, 0.0],
            "sent_s": 0.0,
            "intended_s": 0.0,
            "measured": True,
            "correct": pd.array([None] * 5, dtype="boolean"),
        }
    )
    result = LoadResult(requests, slo_s=0.05, duration_s=1.0, warmup_s=0.0, cpu_s=0.1)
    said = {row.metric: row.ours for row in figures_of("m", "at its rate", 5.0, result)}
    assert said == pytest.approx(
        {
            "rate at its rate": 5.0,
            "in time at its rate": 2.0,
            "late at its rate": 1.0,
            "refused at its rate": 1.0,
            "other at its rate": 1.0,
            "p95 at its rate": 40.0,
            "accuracy at its rate": 85.0,
        }
    )


def test_figures_go_into_the_readme_and_the_heads(tmp_path):
    readme = tmp_path / "README.md"
    for path in [README, *FOLDER.glob("*.yaml")]:
        shutil.copy(path, tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    rows = [*a_run("digits"), *a_run("traffic-loki")]
    rows += figures("traffic-loki, 0.3/s", "")
    for _ in range(2):  # again: in place of the last
        write_figures(rows, readme, tmp_path)
        text = readme.read_text()
        assert text.count("| `digits` | 12 s | 812 MB | 5 | 18 | 1 | 1 | 123 ms |") == 1
        assert text.count("| `traffic-loki` | 5 | 18 | 1 | 1 | 123 ms | 98.7 |") == 1
        head = (tmp_path / "digits.yaml").read_text()
        assert head.count("0.8 GB of memory; first answer after 12 s on 2 cores") == 1
    after = {path.name: path.read_text() for path in tmp_path.iterdir()}
    changed = {name for name, text in after.items() if text != before[name]}
    assert changed <= {"README.md", "digits.yaml", "traffic-loki.yaml"}
    assert text.partition("<!-- shipped: begin -->")[0] in before["README.md"]


def test_failures_are_said_in_the_table():
    found = {row.metric: row.ours for row in a_run("m")}
    found |= {"other at its rate": 2.0, "p95 at 3 ×": None}
    line = table({"m": found}).splitlines()[2]
    assert "| 1 (2 failed) |" in line
    assert line.endswith("| – |")


def test_the_readme_and_the_heads_say_what_the_saved_run_saw():
    saved = load("shipped")
    assert saved is not None and not saved["quick"]
    seen = {}
    for row in saved["rows"]:
        seen.setdefault(row["case"], {})[row["metric"]] = row["ours"]
    assert table(seen) in README.read_text(encoding="utf-8")
    for path in shipped():
        found = seen[path.stem]
        assert needs(found) in path.read_text(encoding="utf-8")
        assert found["elsewhere"] == 0
        rate = Bench.of(path).rate
        assert found["rate at its rate"] == rate
        assert found["rate at 3 ×"] == OVERLOAD * rate
        assert found["in time at its rate"] > 0
