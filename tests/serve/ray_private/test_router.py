"""Calls to workers are one message each way, which Serve has no option for."""

import asyncio
import inspect
from collections import deque
from unittest.mock import Mock

import pytest
from ray.serve._private import router as serve_router
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest, RequestRouter

from ray_slo.serve.ray_private.router import TargetedRouter


def test_a_worker_is_sent_a_plain_call():
    asyncio.run(sent())


async def sent():
    info = Mock(is_cross_language=False, multiplexed_model_ids=[])
    actor = info.get_actor_handle.return_value
    replica = TargetedRouter.create_replica_wrapper(Mock(spec=RequestRouter), info)
    asked = PendingRequest(args=["piece"], kwargs={"worker": "w"}, metadata=metadata())
    with_rejection = not replica.is_cross_language  # as Serve decides it
    replica.try_send_request(asked, with_rejection)
    (_, piece), named = actor.handle_request.remote.call_args
    assert (piece, named) == ("piece", {"worker": "w"})


def metadata():
    return RequestMetadata(request_id="r", internal_request_id="i")


def test_serve_still_decides_by_what_we_answer():
    """Where this fails, Serve has changed: see whether it heeds `supports_rejection_protocol`."""
    decides = inspect.getsource(serve_router.AsyncioRouter._route_and_send_request_once)
    assert "and not replica.is_cross_language" in decides
    assert "supports_rejection_protocol" not in inspect.getsource(serve_router)


def request(number):
    made = RequestMetadata(request_id="r", internal_request_id=str(number))
    asked = PendingRequest(args=[], kwargs={"worker": "w"}, metadata=made)
    asked.reset_future()
    return asked


def test_requests_without_a_replica_are_routed_again():
    """Serve's routing task has no request, and others have no replica (before Ray 2.60)."""
    asyncio.run(routed_again())


async def routed_again():
    answered, dropped, in_line = requests = [request(n) for n in range(3)]
    answered.future.set_result("replica")
    router = TargetedRouter.__new__(TargetedRouter)
    router._pending_requests_to_fulfill = deque(requests)
    router._pending_requests_to_route = deque([in_line])
    assert await router.choose_replicas(["any"], None) == [["any"]]
    assert list(router._pending_requests_to_route) == [in_line, dropped]
    await router.choose_replicas(["any"], None)
    assert list(router._pending_requests_to_route) == [in_line, dropped]


ENDS_WITHOUT_REQUEST = "No more pending" in inspect.getsource(
    RequestRouter._fulfill_pending_requests
)


@pytest.mark.skipif(ENDS_WITHOUT_REQUEST, reason="this Ray drops no request")
def test_a_request_that_its_task_dropped_gets_its_replica():
    """Without our help, Serve's loop is busy for ever here."""
    replica = asyncio.run(asyncio.wait_for(dropped_one(), 10))
    assert replica.replica_id.unique_id == "w"


def router_to(replica):
    name = DeploymentID("d", "a")
    router = TargetedRouter(name, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    router.initialize_state()
    replica.replica_id = ReplicaID("w", name)
    router._replicas = {replica.replica_id: replica}
    router._replicas_list = [replica]
    router._running = {"w"}
    return router


async def dropped_one():
    router = router_to(Mock(max_ongoing_requests=5))
    dropped = request(1)
    router._pending_requests_to_fulfill.append(dropped)
    router._add_pending_request_to_indices(dropped)
    router._maybe_start_routing_tasks()
    return await dropped.future


def test_a_replica_that_hangs_is_not_asked_for_its_queue_before_a_call():
    asyncio.run(asyncio.wait_for(to_one_that_hangs(), 10))


async def to_one_that_hangs():
    replica = Mock(max_ongoing_requests=5)
    replica.get_queue_len.side_effect = AssertionError
    router = router_to(replica)
    for _ in range(3):
        chosen = [router._choose_replica_for_request(request(n)) for n in range(10)]
        assert await asyncio.gather(*chosen) == [replica] * 10
        for _ in range(10):
            router.on_send_request(replica.replica_id)  # and none of them ends
    replica.get_queue_len.assert_not_called()
