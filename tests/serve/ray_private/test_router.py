"""Calls to workers are one message each way, which Serve has no option for."""

import asyncio
import inspect
from unittest.mock import Mock

from ray.serve._private import router as serve_router
from ray.serve._private.common import RequestMetadata
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
