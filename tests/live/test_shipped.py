"""Every file of configs/ that `serve run` takes, live with made-up weights: what clients hear while
it starts, answers, refusals, and where it listens. Figures: `python -m benchmarks shipped`.

Run by `make test-torch`, whose environment has the packages of all of them.
"""

import json

import pytest

from benchmarks.live.shipped import OVERLOAD, serving, shipped
from ray_slo.serve.proxy.modes import free_ports

pytest.importorskip("torchvision", reason="runs in the environment of `make test-torch`")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_starts_answers_and_refuses(path, tmp_path):
    (port,) = free_ports(1)
    with serving(path, tmp_path / "serve.log", port) as running:
        told = running.refusals
        assert set(told) <= {"starting", "404", "503"}, told  # Serve's answers before it has routes
        if "starting" in told:
            said = json.loads(told["starting"])
            assert said["error"] == "NotReady"
            assert said["retry_after_s"] > 0
            assert "cannot be served yet: " in said["message"]
        assert not running.elsewhere, "it listens on other addresses than loopback"
        rate = running.bench.rate
        running.load(rate, 5)
        quiet = running.load(rate, 10).summary["status"]
        assert quiet["ok"] + quiet["late"] > 0
        assert quiet["error"] == quiet["timeout"] == 0
        # On a slow machine this is far more than it can serve.
        loud = running.load(5 * OVERLOAD * rate, 60, seed=1)
        status = loud.summary["status"]
        assert status["error"] == status["timeout"] == 0, loud.sample_errors
        assert sum(status.values()) == 60
        refused = loud.requests[loud.requests["status"].isin(("refused", "expired"))]
        assert all('"reason":' in text.replace('": "', '":"') for text in refused["error"])
        assert all('"message":' in text for text in refused["error"])
        afterwards = running.load(rate, 5, seed=2).summary["status"]
        assert afterwards["ok"] + afterwards["late"] > 0
