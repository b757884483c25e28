"""Processes are killed or fail. Each caller gets an answer or a reason, and no call hangs."""

import contextlib
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import ray
from apps import RaisesOnce, Slow, Tasks
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.schema import ApplicationStatus
from waiting import eventually, held, let_go, status_of

import ray_slo
from ray_slo.errors import RefusedEarly, WorkerLost
from ray_slo.serve.grpc import InferenceStub
from ray_slo.serve.protos import InferRequest
from ray_slo.serve.ray_private.actors import NAMESPACE, find_actor
from tests.docs.pages import ROOT, blocks

SLO_MS = 60_000  # time for Serve to start another replica on a busy machine
TINY = {"num_cpus": 0.1}
TaskApp = ray_slo.deployment(
    latency_slo_ms=SLO_MS, num_replicas=2, ray_actor_options=TINY, profile_seconds=0.3, name="tasks"
)(Tasks)


@pytest.fixture(scope="module", params=["embedded", "actor"])
def app(ray_cluster, request):
    frontends = 1 if request.param == "embedded" else 2
    deployed = TaskApp.options(scheduler=request.param, num_frontends=frontends)
    name = f"faulty-{request.param}"  # a name that no application has
    with ray_cluster.running(deployed.bind(), name, f"/{name}") as handle:
        yield handle


def test_worker_killed_in_the_middle_of_a_batch(app, tmp_path):
    fatal = app.remote(("die_once", str(tmp_path / "died")))
    others = [app.remote(x) for x in range(20)]
    assert isinstance(fatal.result(timeout_s=90), int)  # answered by the other worker
    assert (tmp_path / "died").exists()
    assert [o.result(timeout_s=90) for o in others] == [{"value": float(x * x)} for x in range(20)]
    assert eventually(lambda: len(status_of(app)["workers"]) == 2)


def test_worker_killed_from_outside(app, tmp_path):
    mark = tmp_path / "running"
    running = app.remote(("hold", str(mark)))
    assert eventually(mark.exists)
    killed = busy_worker(app)
    others = [app.remote(x) for x in range(10)]
    ray.kill(killed)
    let_go(mark)  # the batch may run again
    assert isinstance(running.result(timeout_s=90), int)
    assert [o.result(timeout_s=90) for o in others] == [{"value": float(x * x)} for x in range(10)]


def busy_worker(handle):
    """A replica that has a batch in flight, as an actor."""
    busy = [w for w, s in status_of(handle)["workers"].items() if s["batches_in_flight"]]
    assert busy
    return ray.get_actor(
        f"SERVE_REPLICA::{handle.app_name}#tasks-worker#{busy[0]}", namespace="serve"
    )


def test_scheduler_killed_under_load(app, request):
    if request.node.callspec.params["app"] == "embedded":
        pytest.skip("an embedded scheduler dies with its frontend")
    scheduler = find_actor("faulty-actor#tasks")
    epoch = status_of(app)["epoch"]
    answers = []
    for x in range(60):
        answers.append(app.remote(x))
        if x == 30:
            ray.kill(scheduler, no_restart=False)
        time.sleep(0.02)
    assert [a.result(timeout_s=90) for a in answers] == [{"value": float(x * x)} for x in range(60)]
    assert eventually(lambda: status_of(app).get("epoch", epoch) != epoch)
    assert eventually(lambda: len(status_of(app)["workers"]) == 2)


def owns_some(frontend):
    return frontend["pid"] if frontend["owned"] else 0


def test_frontend_killed_with_calls_of_every_kind(ray_cluster, app, request, tmp_path):
    """gRPC's callers, and clients that follow the docs, get answers; a handle raises an error."""
    if request.node.callspec.params["app"] == "embedded":
        pytest.skip("there is no other frontend")
    (page,) = [b.code for b in blocks(ROOT / "docs" / "troubleshooting.md") if "ask(" in b.code]
    exec(page, said := {})
    mark, mine = tmp_path / "running", [("application", "faulty-actor")]
    item = ("hold", str(mark))
    before = status_of(app)["counts"]["submitted"]
    with grpc.insecure_channel(ray_cluster.grpc) as channel, ThreadPoolExecutor(8) as threads:
        infer = InferenceStub(channel).Infer
        wanted = InferRequest(json=json.dumps(item))
        calls = [infer.future(wanted, timeout=90, metadata=mine) for _ in range(8)]
        asked = [threads.submit(said["ask"], app, item, SLO_MS / 1e3) for _ in range(8)]
        plain = [app.remote(item) for _ in range(8)]
        assert eventually(lambda: status_of(app)["counts"]["submitted"] == before + 24)
        os.kill(eventually(lambda: owns_some(status_of(app)["process"])), signal.SIGKILL)
        let_go(mark)
        assert all(json.loads(call.result().json) > 0 for call in calls)
        assert all(one.result(timeout=90) > 0 for one in asked)
    for answer in plain:
        with contextlib.suppress(RayActorError):
            assert answer.result(timeout_s=90) > 0


def test_no_retries_and_a_full_queue_and_an_isolated_poison(ray_cluster, tmp_path):
    deployed = TaskApp.options(
        num_replicas=1, retries=0, max_queued_requests=20, isolate_errors=True
    )
    with ray_cluster.running(deployed.bind(), "strict", "/strict") as handle:
        with held(handle, tmp_path, workers=1):
            poison = handle.remote(("raise", "value"))
            good = [handle.remote(x) for x in range(18)]
            assert eventually(lambda: status_of(handle)["pending"] == 20)
            with pytest.raises(RefusedEarly, match="which is the limit") as full:
                handle.remote(1).result()
            assert full.value.reason == "queue_full"
        with pytest.raises(ValueError, match="poison"):
            poison.result()
        assert [g.result() for g in good] == [{"value": float(x * x)} for x in range(18)]

        lost = handle.remote(("die_once", str(tmp_path / "died")))
        with pytest.raises(WorkerLost, match="was lost with the request"):
            lost.result(timeout_s=90)


def test_slo_that_no_batch_can_meet_is_said_at_deploy_time(ray_cluster, monkeypatch):
    monkeypatch.setattr("ray_slo.serve.app.build._CONSTRUCTOR_RETRIES", 1)
    deployed = ray_slo.deployment(latency_slo_ms=50, ray_actor_options=TINY)(Slow)
    try:
        with pytest.raises(RuntimeError, match="slow failed"):
            serve.run(deployed.bind(), name="slow", route_prefix="/slow")
        state = serve.status().applications["slow"]
        assert state.status == ApplicationStatus.DEPLOY_FAILED
        said = state.deployments["Slow-worker"].message
        assert "models.Slow.latency_slo_ms: no batch can meet 50 ms: a batch of one took" in said
    finally:
        serve.delete("slow")


def test_policy_that_raises_is_restarted_with_its_queue(ray_cluster):
    deployed = TaskApp.options(policy=RaisesOnce, num_replicas=1, scheduler="actor")
    with ray_cluster.running(deployed.bind(), "broken", "/broken") as handle:
        answers = [handle.remote(x) for x in range(10)]
        assert [a.result(timeout_s=90) for a in answers] == [
            {"value": float(x * x)} for x in range(10)
        ]
        find_actor("broken#tasks")

    def is_gone():
        names = ray.util.list_named_actors(all_namespaces=True)
        return {"name": "broken#tasks", "namespace": NAMESPACE} not in names

    assert eventually(is_gone)  # it leaves with its application
