"""One short run of the demo, with a Ray of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pandas as pd
import pytest

from ray_slo.demo.systems import SYSTEMS


@pytest.mark.timeout(960)
def test_the_demo_runs_and_all_answer_rightly(tmp_path) -> None:
    """Far below capacity, so that it holds on a busy machine."""
    args = "--quick --json --variant digits-s --replicas 1 --duration-s 4"
    args += " --rate 4 --slo-ms 9000 --wait-ms 50"
    done = subprocess.run(
        [sys.executable, "-m", "ray_slo.demo", *args.split(), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert set(told["systems"]) == {system.key for system in SYSTEMS}
    for key, summary in told["systems"].items():
        assert summary["status"]["error"] == 0, key
        requests = pd.read_csv(tmp_path / key / "requests.csv")
        answered = requests[requests["status"].isin(("ok", "late"))]
        assert len(answered), key
        assert answered["correct"].astype(bool).mean() > 0.8, key
        assert (answered["batch_size"] >= 1).all(), key
    assert set(told["networks"]) == {"digits-xs", "digits-s"}
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "stream.npz").exists() and (tmp_path / "demo.svg").exists()
