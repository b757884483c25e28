"""The demo's figures in README.md are those of the saved run."""

from benchmarks.harness.readme import BEGIN, END, README, demo, filled
from benchmarks.harness.results import load


def test_the_figures_in_readme_are_those_of_the_saved_run():
    # Otherwise: python -m benchmarks page
    text = README.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert text == filled(text)


def test_figures_are_quoted_only_where_a_run_is_saved():
    quoted = README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert bool(quoted) == (load("live-demo") is not None)


def row(case, metric, ours):
    return {"case": case, "metric": metric, "unit": "", "ours": ours, "paper": None, "peers": {}}


def rows(title, system, part, **figures):
    usual = {"offered": 30.04, "in time": 12.3, "bad": 1.26, "p50": 251.6, "p99": 10_000.0}
    usual |= {"accuracy": 98.0, "in time / tuned": 1.5}
    return [row(f"{title} · {part}, {system}", k, v) for k, v in (usual | figures).items()]


def test_a_line_for_each_part_and_system_of_the_first_run():
    setting = {"SLO": 640.0, "tuned plain Serve holds": 75.6}
    found = [row("run 1 · setting", name, value) for name, value in setting.items()]
    found += rows("run 1", "@serve.batch, tuned", "whole run", accuracy=None)
    found += rows("run 1", "@ray_slo.batch", "whole run", **{"in time / tuned": 2.345})
    found += rows("run 1", "@ray_slo.batch", "calm", p99=99.6)
    found += rows("run 2", "@ray_slo.batch", "calm", offered=777.0)
    text = demo(found)
    assert "640 ms" in text and "held 76 requests/s" in text
    assert "against it: `@ray_slo.batch` 2.35 ×.\n" in text or "`@ray_slo.batch` 2.34 ×" in text
    assert "| whole run | `@serve.batch`, tuned | 30.0 /s | 12.3 /s | 1.3 % | 252 ms |" in text
    assert "| > 10000 ms | – |\n" in text
    assert "| calm | `@ray_slo.batch` | 30.0 /s | 12.3 /s | 1.3 % | 252 ms | 100 ms |" in text
    assert "777" not in text and len(text.splitlines()) == 3 + 2 + 3
