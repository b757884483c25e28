"""Runs of the demo with made-up figures."""

import numpy as np

from ray_slo.demo.calibrate import Calibration, Climb
from ray_slo.demo.extras import CAREFUL, FOLLOWED, HASTY, Model, followed
from ray_slo.demo.machine import Use
from ray_slo.demo.report import Found
from ray_slo.demo.stream import STORY, Sums, record
from ray_slo.demo.systems import SYSTEMS, Settings, Way
from ray_slo.load.report import LoadResult, Sample
from ray_slo.load.workload import Payloads

SLO_S = 0.6
PAYLOADS = Payloads([b"x"], ["3"])
SETTINGS = Settings(("digits-s", "digits-xl"), 2, 32, slo_s=SLO_S, way=Way(0.15))
HELD = 20.0


def samples(workload, latency_s, accuracy=None):
    """Answers that take `latency_s(at)`; None is a refusal."""
    headers = {"x-slo-batch-size": "4"}
    for at in workload.times_s.tolist():
        took, told = latency_s(at), dict(headers)
        if accuracy is not None:
            told["x-slo-accuracy"] = f"{accuracy(at):.2f}"
        if took is None:
            yield Sample(at, at + 0.01, "refused", 503, "too late", {}, b"")
        else:
            yield Sample(at, at + took, "answered", 200, None, told, b'{"label": 3}')


def run(latency_s, accuracy=None, story=STORY, warm_up_s=2.0):
    """What became of a stream with made-up latencies."""
    workload = record(story, HELD, PAYLOADS, warm_up_s=warm_up_s, seed=0)
    made = list(samples(workload, latency_s, accuracy))
    return LoadResult.from_samples(made, workload, PAYLOADS, slo_s=SLO_S, cpu_s=0.1)


def found(plain=lambda at: 0.2 if at < 20 else 5.0, ours=lambda at: 0.3, accuracy=lambda at: 99.0):
    """A whole run of the demo. Plain Serve is late from the end of the calm stretch on."""
    made = Found(
        Calibration(SETTINGS, 25.0, HELD, [Climb(SETTINGS.way, HELD, (1, 99), [(HELD, 0.005)])]),
        {"digits-s": 0.97, "digits-xl": 0.99},
        {"hardware": "a <test> machine", "mode": "fast"},
        STORY,
    )
    for system in SYSTEMS:
        told = accuracy if system.key == "deployment" else None
        made.results[system] = run(ours if system.ours else plain, told)
        made.uses[system.name] = Use(0.01, 0.0, 0.002)
    made.models = [model(HASTY, 0.3, 0.0), model(CAREFUL, 1.2, 0.01)]
    made.following = followed(
        run(ours, story=FOLLOWED), [(at, 2 if 12 <= at < 35 else 1) for at in np.arange(0, 40, 0.5)]
    )
    return made


def model(name, slo_s, bad):
    return Model(name, "digits-s", slo_s, figures(10.0, bad), batch=3.0)


def figures(offered=10.0, bad=0.0, **more):
    """Sums of which a share was bad."""
    return Sums(
        offered,
        offered * (1 - bad),
        bad,
        **{"p50_ms": 100.0, "p99_ms": 200.0, **more},
        accuracy=0.98,
        seconds=10.0,
    )
