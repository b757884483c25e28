"""The claims of SHEPHERD's Figure 8. The program itself runs in `test_front_door`."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.shepherd import fig8
from benchmarks.shepherd.systems import SLO_MS

SYSTEMS = ("SHEPHERD", "Clockwork", "Nexus, as planned")
LOW, HIGH = "MAF-stable, 3,000 requests/s", "MAF-stable, 144,000 requests/s"


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fig8, "COMPARED", SYSTEMS)
        return fig8.run(quick=True, seed=1)


def summary(rows, load, metric):
    found = {r.case: r.ours for r in rows if r.metric == metric}
    return {name: found[f"{load}, summary · {name}"] for name in SYSTEMS}


def test_at_low_load_nearly_all_is_answered_and_far_from_the_slo(rows):
    assert min(summary(rows, LOW, "answered").values()) > 95
    assert max(summary(rows, LOW, "latency p50").values()) < SLO_MS / 2
    assert max(summary(rows, LOW, "near the SLO").values()) < 15


def test_at_high_load_the_peers_answer_at_the_slo_and_shepherd_evenly(rows):
    near, unevenness = (summary(rows, HIGH, m) for m in ("near the SLO", "unevenness"))
    for peer in ("Clockwork", "Nexus, as planned"):
        assert near[peer] > 80 > 60 > near["SHEPHERD"]
        assert unevenness[peer] > 1.3 * unevenness["SHEPHERD"]
    answered = summary(rows, HIGH, "answered")
    assert max(answered, key=answered.get) == "SHEPHERD"


@pytest.mark.parametrize("load", [LOW, HIGH])
def test_percentiles_are_in_order_and_within_the_slo(rows, load):
    for name in SYSTEMS:
        curve = {r.case: r.ours for r in rows if r.metric == name and r.case.startswith(load)}
        assert list(curve) == [f"{load} · p{p}" for p in fig8.PERCENTILES]
        values = list(curve.values())
        assert values == sorted(values) and values[0] > 0 and values[-1] <= SLO_MS + 1e-3
        median = summary(rows, load, "latency p50")[name]
        assert curve[f"{load} · p50"] == pytest.approx(median)


def test_unevenness():
    assert fig8.unevenness(np.linspace(0, 1, 1001)) < 0.01
    assert fig8.unevenness(np.ones(10)) == pytest.approx(1)
    assert fig8.unevenness(np.full(10, 0.5)) == pytest.approx(0.5)
    assert fig8.unevenness(np.linspace(0.5, 1, 1001)) == pytest.approx(0.5, abs=0.01)


def test_a_plot_per_workload(rows, tmp_path):
    assert [p.name for p in fig8.plot(rows, tmp_path)] == ["latency-maf-stable.png"]
