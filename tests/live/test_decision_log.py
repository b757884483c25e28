"""A live run is recorded, and a new policy decides the same on the record."""

import pytest
from waiting import eventually, status_of

from ray_slo.errors import Expired, RefusedEarly
from ray_slo.record.decode import read
from ray_slo.serve import build_app
from ray_slo.simulation.replay import recorded, replay, tape, what_if

ARGS = {
    "models": {"square": {"callable": "apps:Tasks", "latency_slo_ms": 30_000}},
    "workers": {"small": {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.1}}},
    "policy": "deferred",
    "profile_seconds": 0.3,
}


def test_a_live_run_replays_to_the_same_decisions(ray_cluster, tmp_path):
    log = {"dir": str(tmp_path), "flush_s": 0.2}
    app = build_app({**ARGS, "scheduler": "actor", "decision_log": log})
    with ray_cluster.running(app, "logged", "/logged") as handle:
        for burst in range(4):
            answers = [handle.remote(i) for i in range(1 + 6 * burst)]
            assert [a.result()["value"] for a in answers] == [i * i for i in range(len(answers))]

        def refused():  # by the scheduler; on a busy machine the frontend may refuse earlier
            with pytest.raises((RefusedEarly, Expired)):
                handle.remote(1, latency_slo_ms=30).result()
            return status_of(handle)["counts"]["refused"]

        assert eventually(refused)
        seen = status_of(handle)
        log, submitted = seen["decision_log"], seen["counts"]["submitted"]
    (life,) = _finished(tmp_path, submitted)
    assert (log["rows_lost"], log["error"]) == (0, "")
    assert life.whole
    assert life.start.policy == "deferred"
    assert life.start.about["models"] == ["square"]
    replayed = replay(life)
    assert replayed.identical, replayed.difference
    assert replayed.actions > 4
    report = recorded(life)
    assert report.count() == submitted
    assert report.count("good") == 40
    assert report.count("dropped") == submitted - 40 == seen["counts"]["refused"]
    predicted = report.batches["predicted_finish_s"] - report.batches["finished_s"]
    assert predicted.abs().max() < 30
    assert what_if(tape(life), "eager").count("good") == 40


def _finished(folder, submitted):
    """The lives in the log once the scheduler wrote its last line."""

    def lives():
        found = read(folder) if list(folder.glob("*.parquet")) else []
        return found and recorded(found[0]).count() == submitted and found

    return eventually(lives)
