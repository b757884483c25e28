"""How a frontend calls its workers, with plain fakes for their handles and the scheduler."""

import asyncio
from types import SimpleNamespace

import pytest
import ray

from ray_slo.errors import BatchResultError, ConfigError, RefusedEarly, WorkerLost
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.frontend.ledger import Asked, Entry, WorkerGone
from ray_slo.serve.frontend.startup import Deployment
from ray_slo.serve.frontend.workers import Up, Workers, check_names
from ray_slo.serve.messages import Capacity, Grant, PieceResult
from tests.serve.fakes import surroundings
from tests.serve.loops import in_loop

GRANT = Grant("b", "w0", "gpu", "m", "v", (1,), 0, 1, 1, 0.0, 0.1, 1.0)


def workers(execute=None, capacity=None, why="", states=None):
    handle = SimpleNamespace(execute=SimpleNamespace(remote=execute), deployment_name="m-worker")
    given = {} if states is None else {"states": lambda app, kinds: states}
    return Workers(
        parse_spec({"models": {"m": {"callable": "apps:M", "latency_slo_ms": 100}}}),
        surroundings("m", ended_itself={"w0": why}.get, **given),
        {"gpu": handle},
        SimpleNamespace(capacity=capacity),
        spawn=asyncio.ensure_future,
        plan_says=lambda: (None, None),
    )


@in_loop
async def test_a_share_goes_to_the_worker_of_its_grant():
    sent = []

    async def execute(piece, worker):
        sent.append((worker, piece.batch_id, piece.variant, piece.items, piece.num_pieces))
        return PieceResult([(True, 1)])

    share = [Entry(1, "m", Asked("m", 0.0, 1.0), "item", 0.0)]
    result = await workers(execute).execute(GRANT, share)
    assert (result.results, sent) == ([(True, 1)], [("w0", "b", "v", ["item"], 1)])


@in_loop
@pytest.mark.parametrize("why", ["", "os._exit(1)"])
async def test_a_worker_that_is_gone_may_have_said_why(why):
    async def execute(piece, worker):
        raise ray.exceptions.RayActorError

    with pytest.raises(WorkerGone) as gone:
        await workers(execute, why=why).execute(GRANT, [])
    assert gone.value.own_end == why
    assert str(gone.value) == (f"it ended itself: {why}" if why else "RayActorError")


@in_loop
async def test_what_the_router_says_is_passed_on():
    async def execute(piece, worker):
        raise WorkerLost("worker w0 is not among the running replicas")

    with pytest.raises(WorkerLost):
        await workers(execute).execute(GRANT, [])


@in_loop
async def test_a_worker_of_a_release_with_other_kinds_is_no_fault_of_the_request():
    with pytest.raises(RefusedEarly, match="of another release") as refused:
        await workers().execute(GRANT._replace(kind="tpu"), [])
    assert (refused.value.http_status, refused.value.reason) == (503, "no_worker")


@in_loop
async def test_an_error_of_ray_itself_is_said_without_its_stack_trace():
    trace = 'Traceback:\n  File "/srv/app/model.py", line 1'

    async def execute(piece, worker):
        raise ray.exceptions.RaySystemError("no /srv/app/model.py there", trace)

    with pytest.raises(BatchResultError) as failed:
        await workers(execute).execute(GRANT, [])
    assert str(failed.value).startswith("Ray could not pass the batch on: RaySystemError: ")
    assert "/srv" not in str(failed.value)

    async def raises(piece, worker):
        raise ray.exceptions.RayTaskError("e", trace, ValueError("said")).as_instanceof_cause()

    with pytest.raises(ValueError) as raised:
        await workers(raises).execute(GRANT, [])
    assert str(raised.value.cause) == "said"


@in_loop
async def test_a_worker_without_a_connection_is_asked_for_its_address():
    asked = []

    async def address(worker):
        asked.append(worker)
        return ""

    there = workers()
    there._handles["gpu"].address = SimpleNamespace(remote=address)
    await there.alive("gpu", "w0")
    assert "w0" in asked


@in_loop
@pytest.mark.parametrize(("others", "may_be"), [({"w1"}, True), (set(), False)])
async def test_the_last_worker_of_a_model_is_not_given_up(others, may_be):
    async def capacity():
        return {"m": Capacity(100.0, frozenset({"w0"} | others))}

    there = workers(capacity=capacity)
    assert not there.may_be_gone("m", "w0")  # nobody knows of others yet
    await there.up("m")
    assert there.may_be_gone("m", "w0") == may_be
    assert not there.may_be_gone("another", "w0")


@in_loop
async def test_a_process_of_this_machine_that_runs_is_not_given_up():
    async def capacity():
        return {"m": Capacity(100.0, frozenset({"w0", "w1"}))}

    there = workers(capacity=capacity)
    await there.up("m")
    there._connections._open["w0"] = SimpleNamespace(is_running=True)
    assert not there.may_be_gone("m", "w0")
    assert there.may_be_gone("m", "w1")


@in_loop
async def test_the_most_workers_that_a_model_had_are_remembered():
    found = [{"w0", "w1"}, {"w1"}]

    async def capacity():
        return {"m": Capacity(100.0, frozenset(found.pop(0)))}

    there = workers(capacity=capacity)
    assert await there.up("m") == Up({"w0", "w1"}, 2)
    assert await there.up("m") == Up({"w1"}, 2)
    assert there.capacity_of("m").rate == 100.0


@in_loop
async def test_a_request_that_can_wait_for_the_first_worker_is_not_refused():
    async def capacity():
        return {}

    states = {"gpu": Deployment(0, 1, awaited=True)}
    there = workers(capacity=capacity, states=states)
    there._meeting = asyncio.get_running_loop().create_future()
    looking = asyncio.ensure_future(there._watch_startup())
    assert await there.refusal("m", 60.0) is None
    assert await there.refusal("m", 0.5) is not None
    states["gpu"] = Deployment(0, 1, "A replica failed to start.")
    assert await there.refusal("m", 60.0) is not None
    looking.cancel()


@in_loop
@pytest.mark.parametrize(("slo_s", "waits_s"), [(30.0, None), (2.0, 2.0), (0.1, 1.0)])
async def test_a_look_that_takes_long_is_waited_for_as_the_slo_allows(slo_s, waits_s):
    """On a starved machine: workers are up, and the scheduler takes its time to say so."""
    since, loop = [], asyncio.get_running_loop()

    async def capacity():
        since.append(loop.time())
        await asyncio.sleep(1.5)
        return {"m": Capacity(1.0, frozenset({"w0"}))} if len(since) > 1 else {}

    there = workers(capacity=capacity)
    there._meeting = loop.create_future()
    looking = asyncio.ensure_future(there._watch_startup())
    await asyncio.sleep(0.1)  # in the first look
    began = loop.time()
    refused = await there.refusal("m", slo_s)
    assert (refused is None) == (waits_s is None)
    if waits_s is not None:
        assert loop.time() - began == pytest.approx(waits_s, abs=0.1)
    looking.cancel()


@in_loop
async def test_requests_are_let_in_while_the_scheduler_starts_if_serve_says_that_workers_run():
    async def capacity():
        await asyncio.Event().wait()  # it does not answer

    for running, starting in ((1, 0), (0, 1)):
        there = workers(capacity=capacity, states={"gpu": Deployment(running, starting)})
        there._meeting = asyncio.get_running_loop().create_future()
        looking = asyncio.ensure_future(there._watch_startup())
        refused = await there.refusal("m", 30.0)
        assert (refused is None) == (running == 1)
        looking.cancel()


def test_another_deployment_of_the_name_is_refused():
    def handle(name):
        return {"default": SimpleNamespace(deployment_name=name)}

    check_names("m", "m", handle("m-worker"))
    check_names("m_1", "m", handle("m-worker_1"))
    with pytest.raises(ConfigError, match="another deployment of the application is named 'm'"):
        check_names("m_1", "m", handle("m-worker"))
