"""The program `gpu` on a CPU with tiny networks: the parts that start no Ray, and what happens when
one fails.
"""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'ray-slo[text]'")

from benchmarks.__main__ import main  # noqa: E402
from benchmarks.gpu import memory, parts, preemption, profiles, serving, suite  # noqa: E402
from benchmarks.gpu.setting import Network, Setting, Stopwatch  # noqa: E402
from benchmarks.harness.data import Missing  # noqa: E402
from benchmarks.harness.rows import Failed, Row  # noqa: E402
from ray_slo.models.running import How  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = Setting(tiny=True, seed=0, seconds=0.3)


@pytest.fixture(autouse=True)
def networks(monkeypatch):
    """One of pictures and one of two inputs stand for those that take seconds to import."""

    def of_two_inputs(_):
        def items(count):
            return {"x": torch.ones(count, 4), "y": torch.ones(count, 4)}

        build = torch.nn.Linear(4, 2).eval
        return Network("BERT-base", build, items, lambda net, both: net(both["x"] + both["y"]), 2)

    def missing(_):
        raise Missing("EfficientNet needs torchvision")

    monkeypatch.setattr(Setting, "bert", of_two_inputs)
    monkeypatch.setattr(Setting, "efficientnet", missing)


def by_case(found):
    cases: dict[str, dict[str, float]] = {}
    for row in found:
        cases.setdefault(row.case, {})[row.metric] = row.ours
    return cases


def test_profiles():
    cases = by_case(profiles.rows(TINY))
    assert cases["left out: EfficientNet needs torchvision"] == {"networks measured": 0}
    ways = [case for case in cases if case.startswith("ResNet50, ways to run it")]
    assert ways[0].endswith(" · float32, eager") and len(ways) == 4
    assert cases[ways[0]]["off"] == 0 and cases[ways[0]]["batch of 8"] > 0
    plain = f"ResNet50 on {TINY.name} · float32, eager"
    assert {f"{plain}, batch of {b}" for b in (1, 2, 4, 8)} <= set(cases)
    one = cases[f"{plain}, batch of 1"]
    assert 0 < one["on the device p50"] <= one["p95"] and one["throughput"] > 0
    assert {"α", "β"} <= set(cases[plain])
    ahead = [figures for figures in cases.values() if "staged ahead" in figures]
    assert len(ahead) == 2 and all(
        figures["gain"] == pytest.approx(figures["staged ahead"] / figures["staged in turn"])
        for figures in ahead
    )
    assert any(case.startswith("BERT-base on") for case in cases)


def test_exit_points_and_two_streams():
    found = list(preemption.exit_points(TINY))
    cases, rows = by_case(found), {r.metric: r for r in found if "· BERT-base" in r.case}
    assert rows["α"].paper == 40.98 and rows["exit points"].paper == 43  # Table 4
    for name in ("ResNet18", "ResNet50", "BERT-base"):
        found = cases[f"exit points on {TINY.name} · {name}"]
        assert found["exit points"] in (0, 2) and found["delay p95"] > 0
    assert cases["ResNet50, batch 4 · 2 exit points"]["preempted batches"] >= 0
    cases = by_case(preemption.two_streams(TINY))
    assert len(cases) == 8
    assert cases["two streams, SLO 90 ms, many bursts · flex"]["flex is better by"] in (0, 1)


def test_one_process(monkeypatch):
    monkeypatch.setattr(serving, "LOADS", (1.0,))
    monkeypatch.setattr(serving, "WAITS", (0.1, 1.0))
    cases = by_case(serving.one_process(TINY))
    assert sum(" · wait " in case for case in cases) == len(serving.WAITS)
    for policy in ("auto", "timeout, tuned"):
        assert sum(case.endswith(f" · {policy}") and "/s · " in case for case in cases) == 1
    assert any("over the tuned wait" in figures for figures in cases.values())


def test_memory():
    cases = by_case(memory.memory(TINY))
    of_each = [figures for figures in cases.values() if "loaded" in figures]
    assert len(of_each) == 8 and all(figures["loaded"] >= 0 for figures in of_each)
    assert cases["memory of the host · all 8"]["room"] > 0


def test_on_a_gpu_events_are_what_counts(monkeypatch):
    """The stopwatch on a pretended GPU: events before and after, on the stream that computes."""
    network = TINY.resnet(18)
    runner = network.runner(torch.device("cpu"), How())
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("synchronise")

        def elapsed_time(self, end):
            return 7.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    stopwatch = Stopwatch(runner)
    stopwatch._on_gpu = True
    device_s, host_s = stopwatch(network.stage(runner, 2))
    assert device_s == 0.007 and host_s > 0 and log == ["record", "record", "synchronise"]


def test_without_a_gpu_only_tiny_runs(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit:
        main(["gpu"])
    assert exit.value.code == 77 and "--tiny runs it on the CPU" in capsys.readouterr().err


# -- the parts' processes ----------------------------------------------------------------------


HERE = "tests.benchmarks.gpu.made_up_parts"


@pytest.mark.slow
def test_a_part_that_fails_or_takes_too_long_is_reported_and_the_others_go_on(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(parts, "_END_S", 0.1)
    weights = {"bad": 1000.0, "slow": 1.0, "good": 999.0}
    held = {name: (f"{HERE}:{name}", weight) for name, weight in weights.items()}
    rows, complaints = parts.held(False, 3, 2000.0, tmp_path, held)
    assert complaints[0] == "bad: RuntimeError: the device is gone"
    assert len(complaints) == 2 and complaints[1].startswith("slow: stopped after 2 s")
    cases = by_case(rows)
    assert cases["bad · before"] and cases["good · False"] == {"seed": 3}
    assert cases["parts that failed · bad: RuntimeError: the device is gone"] == {"failed": 1}
    assert "the device is gone" in (tmp_path / "bad.txt").read_text()


def test_a_part_writes_its_rows_and_what_is_missing_is_one(tmp_path):
    path = tmp_path / "rows.jsonl"
    for part in ("good", "absent"):
        args = [f"{HERE}:{part}", "--rows", str(path), "--seed", "3", "--until", "0", "--tiny"]
        parts.main(args)
    good, absent = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert (good["case"], good["ours"]) == ("good · True", 3)
    assert (absent["case"], absent["ours"]) == (
        f"left out · {HERE}:absent: Ray is not installed",
        0,
    )


def test_the_report_begins_with_what_failed(tmp_path, monkeypatch, capsys):
    found = [Row("profiles · a", "ms", "ms", 1.5, 2.0)], ["memory: gone"]
    monkeypatch.setattr(suite, "held", lambda *args: found)
    with pytest.raises(Failed) as failed:
        suite.run(False, 0, tiny=True, minutes=1, folder=tmp_path)
    assert list(failed.value.complaints) == ["memory: gone"]
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# this CPU, tiny networks\n\nAll measurements for a GPU")
    assert text.index("**failed:** memory: gone") < text.index("| a | 1.5<br>paper 2 |")
    assert "report.md" in capsys.readouterr().out


def test_every_part_is_there():
    from importlib import import_module

    for where, weight in parts.PARTS.values():
        module, _, function = where.partition(":")
        assert callable(getattr(import_module(module), function)) and weight > 0
