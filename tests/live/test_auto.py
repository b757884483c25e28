"""`auto` rehearses in another process and changes its setting under load. No request is lost."""

import asyncio
import json
import os
import time

import apps
import pyarrow.parquet as pq
import pytest
import ray
import stages
from loads import MAY_BE, Load
from waiting import eventually, status_of

import ray_slo
from ray_slo.record.decode import read
from ray_slo.serve import build_app
from ray_slo.serve.ray_private.actors import OtherProcess, in_task
from ray_slo.simulation.replay import replay, tape, what_if

TINY = {"ray_actor_options": {"num_cpus": 0.1}}
# The first candidate waits for 30 s. That is more than the SLO, so requests are refused.
AUTO = {
    "name": "auto",
    "kwargs": {"candidates": [{"policy": "timeout", "kwargs": {"timeout_ms": 30_000}}, "eager"]},
}
MODEL = {"callable": "apps:Tasks", "latency_slo_ms": 4000, "max_batch_size": 512}


def of_auto(handle):
    return status_of(handle)["groups"]["g"].get("auto")


def test_it_answers_through_a_swap_and_says_why(ray_cluster, tmp_path):
    app = build_app(
        {
            "models": {"square": MODEL},
            "groups": {"g": {"models": ["square"], "workers": {"small": TINY}}},
            "policy": AUTO,
            "profile_seconds": 0.3,
            "decision_log": {"dir": str(tmp_path), "flush_s": 0.2},
        }
    )
    with ray_cluster.running(app, "auto-groups", "/auto-groups") as handle:
        assert eventually(lambda: of_auto(handle))
        first = of_auto(handle)
        assert first["setting"].startswith("timeout")
        assert first["why"] == "first guess for this application"

        with Load(handle.remote, 0.02, lambda n, got: got == {"value": float(n * n)}) as load:
            assert eventually(lambda: of_auto(handle)["setting"][:5] == "eager", 120)
            before = load.sent
            assert eventually(lambda: load.sent > before + 50)
        after = of_auto(handle)
        seen = status_of(handle)
    # Every request hears something; once it has changed, that is an answer.
    assert set(load.outcomes) <= {"ok", *MAY_BE}
    assert load.outcomes[-25:].count("ok") > 12
    assert after["held"] >= 1
    assert "value in time" in after["why"] or "1 % bad" in after["why"]
    change = next(r for r in after["rehearsals"] if r["before"].startswith("timeout"))
    assert change["setting"] == after["setting"]
    assert change["tried"][after["setting"]]["bad"] < 0.05
    assert seen["policy"] == "auto"
    (life,) = whole_lives(tmp_path, load.sent)
    changes = [row for row in rows_of(tmp_path) if row["what"] == "setting"]
    assert [json.loads(row["detail"])["setting"].split()[0] for row in changes[:2]] == (
        ["timeout", "eager"]
    )
    replayed = replay(life)
    assert replayed.identical, replayed.difference
    assert what_if(tape(life), "auto").count() == load.sent


@pytest.mark.timeout(400)
def test_a_pipeline_with_variants_is_rehearsed_too(ray_cluster):
    speller = ray_slo.Pipeline(
        stages.tasks(),
        latency_slo_ms=8000,
        join=stages.joined,
        num_replicas=2,
        planner=None,
        policy="auto",
        name="auto_speller",
        profile_seconds=0.4,
        **TINY,
    )
    with ray_cluster.running(speller.bind(), "auto_speller", "/auto_speller") as handle:
        answers = []

        def rehearsed():
            answers.extend(handle.remote("to be") for _ in range(5))
            return status_of(handle)["auto"]["held"]

        assert eventually(rehearsed, 200)  # the pure tests have the same low priority
        found = status_of(handle)["auto"]
        assert {outcome(a, dict) for a in answers[-10:]} <= {"ok", "RefusedEarly", "Expired"}
    assert found["failed"] == 0
    tried = found["rehearsals"][-1]["tried"]
    assert len(tried) > 2
    assert not [label for label, score in tried.items() if "error" in score]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("elsewhere", [in_task, OtherProcess()], ids=["task", "process"])
def test_work_that_nobody_waits_for_any_more_ends(tmp_path, elsewhere):
    file = tmp_path / "ticks"

    async def wait_a_little():
        running = asyncio.ensure_future(elsewhere(apps.tick, str(file)))
        assert await asyncio.to_thread(eventually, file.exists)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running, 0.1)
        assert len(await elsewhere(apps.process_of, None)) == 2

    asyncio.run(wait_a_little())

    def is_over():
        size = file.stat().st_size
        time.sleep(1.0)
        return file.stat().st_size == size

    assert eventually(is_over, 30)


@pytest.mark.usefixtures("ray_cluster")
def test_another_process_stays_and_what_it_raises_arrives():
    async def calls():
        other = OtherProcess()
        first = await other(apps.process_of, None)
        with pytest.raises(ValueError, match="invalid literal"):
            await other(int, "x")
        assert await other(apps.process_of, None) == first
        assert first[1] == 19  # niceness
        with pytest.raises(ray.exceptions.RayActorError):
            await other(os._exit, 1)
        assert await other(apps.process_of, None) != first
        other.close()

    asyncio.run(calls())


def outcome(answer, wanted):
    """The outcome of a request: "ok" for an answer of this value or type, or the error's name."""
    try:
        got = answer.result(timeout_s=60)
        assert wanted in (got, type(got))
    except Exception as error:
        return type(getattr(error, "cause", None) or error).__name__
    return "ok"


def rows_of(folder):
    return [
        row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def whole_lives(folder, count):
    """The lives in the log once the scheduler wrote its last line."""

    def lives():
        found = read(folder) if list(folder.glob("*.parquet")) else []
        return found and found[0].whole and len(tape(found[0]).requests) == count and found

    return eventually(lives)
