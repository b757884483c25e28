import json
from io import StringIO

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from ray_slo.core import Cluster, LatencyProfile, Model, Variant
from ray_slo.simulation import Constant, Report, Times, Workload, report_plots, simulate


@pytest.fixture
def report(greedy, make_cluster):
    """R0 alone 0–6, R1 and R2 6–13, R3 and R4 dropped; measured from R1 on, until 16."""
    workload = Workload(arrivals=Times(times_s=[0, 1, 2, 6, 6]))
    cluster = make_cluster(workers=1, accuracy=80.0)
    return simulate(greedy(), cluster, workload, duration_s=16, warmup_s=1)


def test_counts_what_arrives_in_the_window(report):
    assert report.count() == 4
    assert {o: report.count(o) for o in ("good", "late", "dropped", "pending")} == {
        "good": 2,
        "late": 0,
        "dropped": 2,
        "pending": 0,
    }
    assert report.offered == pytest.approx(4 / 15)
    assert report.goodput == pytest.approx(2 / 15)
    assert report.bad_rate() == report.bad_rate("m") == report.worst_bad_rate == 0.5
    assert len(report.requests) == 5
    assert report.requests.measured.tolist() == [False, True, True, True, True]


def test_latency_queueing_and_batches(report):
    assert report.latencies_s().tolist() == [12, 11]
    assert report.queueing_s("m").tolist() == [5, 4]
    assert report.latency_s(50) == 11.5
    assert report.batch_sizes.tolist() == [2]
    assert report.requests.slack_s.tolist()[:3] == [6, 0, 1]
    assert report.requests.worker.tolist()[:4] == ["w0"] * 3 + [np.nan]


def test_utilisation_is_of_the_window(report):
    assert report.utilisation() == {"w0": pytest.approx(12 / 15)}
    assert report.idle_fraction == pytest.approx(3 / 15)


def test_accuracy_is_over_good_requests(report, greedy, make_cluster):
    assert report.accuracy == 80
    unknown = simulate(greedy(), make_cluster(), Workload(arrivals=Times(times_s=[0])))
    assert unknown.accuracy is None


def test_figures_per_model(greedy):
    profile = LatencyProfile.linear(0.0, 1.0)
    models = [
        Model(name, slo, (Variant(name, {"default": profile}),))
        for name, slo in (("loose", 4.0), ("tight", 0.5))
    ]
    report = simulate(
        greedy(), Cluster.uniform(models, 2), Workload(arrivals=Constant(rate=1)), duration_s=20
    )
    assert report.bad_rate("loose") == 0
    assert report.bad_rate("tight") == report.worst_bad_rate == 1
    assert report.bad_rate() == 0.5
    assert np.isnan(report.latency_s(99, "tight"))
    assert report.summary()["models"]["tight"]["latency_p99_ms"] is None
    with pytest.raises(ValueError, match="'other' is unknown"):
        report.bad_rate("other")


def test_summary_is_json(report):
    summary = json.loads(json.dumps(report.summary(), allow_nan=False))
    assert summary["goodput_per_s"] == pytest.approx(2 / 15)
    assert summary["models"]["m"]["slo_ms"] == 12000
    assert summary["batch_size_mean"] == 2


def test_table_shows_the_models(report):
    console = Console(width=100, record=True, file=StringIO())
    console.print(report.table())
    text = console.export_text()
    assert "50.00%" in text
    assert "11500.0" in text


def test_save_and_load_give_the_same_report(report, tmp_path):
    report.save(tmp_path / "run.npz")
    loaded = Report.load(tmp_path / "run.npz")
    assert loaded.summary() == report.summary()
    assert loaded.requests.equals(report.requests)
    assert loaded.batches.equals(report.batches)


def test_load_refuses_other_files(report, tmp_path):
    path = tmp_path / "x.npz"
    path.write_text("no report")
    with pytest.raises(ValueError, match="not a report file"):
        Report.load(path)
    np.savez(path, meta=np.array(json.dumps({"format": "ray-slo/report/0"})))
    with pytest.raises(ValueError, match="format must be"):
        Report.load(path)
    with pytest.raises(FileNotFoundError):
        Report.load(tmp_path / "none.npz")


@pytest.mark.slow
def test_write_leaves_files_and_plots(report, tmp_path):
    written = {p.name for p in report.write(tmp_path / "out")}
    assert written == {
        "report.npz",
        "summary.json",
        "requests.csv",
        "batches.csv",
        "latency.png",
        "batch_size.png",
        "queueing.png",
        "goodput.png",
        "gantt.png",
    }
    assert {p.name for p in (tmp_path / "out").iterdir()} == written
    for name, frame in (("requests", report.requests), ("batches", report.batches)):
        read = pd.read_csv(tmp_path / "out" / f"{name}.csv")
        assert read.columns.tolist() == frame.columns.tolist()
        assert len(read) == len(frame) > 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == report.summary()


def axes_of(draw, report):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw(report, axes)
    return axes


def test_plots_have_the_report_s_figures_in_their_units(report):
    axes = axes_of(report_plots.draw_latency, report)
    curve, slo = axes.get_lines()
    assert curve.get_xdata().tolist() == [11_000, 12_000]
    assert curve.get_ydata().tolist() == [0.25, 0.5]  # two of four were answered
    assert list(slo.get_xdata()) == [12_000, 12_000]
    assert axes.get_ylim() == (0, 1.02) and "ms" in axes.get_xlabel()

    axes = axes_of(report_plots.draw_queueing, report)
    assert axes.get_lines()[0].get_xdata().tolist() == [4_000, 5_000]
    assert axes.get_ylim() == (0, 1.02) and axes.get_legend() is not None

    bars = axes_of(report_plots.draw_batch_sizes, report).patches
    assert [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in bars] == [
        (pytest.approx(1.0), 0),
        (pytest.approx(2.0), 1),
    ]

    axes = axes_of(report_plots.draw_goodput, report)
    offered, good = (patch for patch in axes.patches if hasattr(patch, "get_data"))
    width = 16 / 50
    assert offered.get_data().values.sum() * width == pytest.approx(5)
    assert good.get_data().values.sum() * width == pytest.approx(3)
    assert axes.get_xlim() == (0, 16) and axes.get_ylim()[0] == 0


def test_a_run_without_requests(greedy, make_cluster, tmp_path):
    empty = simulate(
        greedy(), make_cluster(), Workload(arrivals=Constant(rate=1, start_s=9)), duration_s=5
    )
    assert empty.count() == empty.goodput == empty.bad_rate() == 0
    assert empty.idle_fraction == 1
    json.dumps(empty.summary(), allow_nan=False)
    assert len(empty.plot(tmp_path)) == 4
    assert empty.requests.empty


def test_the_table_of_several_models_ends_with_all_of_them(greedy, make_cluster):
    cluster = make_cluster(models=("a", "b"))
    workload = Workload(arrivals=Times(times_s=[0, 6, 20, 40]))
    made = simulate(greedy(), cluster, workload, duration_s=60)
    console = Console(width=100, file=StringIO())
    console.print(made.table())
    names = [line.split()[0] for line in console.file.getvalue().splitlines() if line.strip()]
    assert [name for name in names if name in ("a", "b", "all")] == ["a", "b", "all"]
    assert repr(made) == "Report(Greedy: 4 requests, goodput 0.06667/s, bad 0.00%)"
