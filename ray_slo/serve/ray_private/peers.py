"""Calls every replica of a deployment, and the proxy that a request comes from. The result of
`DeploymentHandle.broadcast` is an alpha API. What a replica asks a proxy is private, and so is the
option of a handle by which its calls have no largest size.
`tests/serve/ray_private/test_peers.py` fails when they have changed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

_TURNS = 5  # turns of the event loop in which an answer reaches who waits for it


async def asked_all(app: str, deployment: str, method: str, timeout_s: float) -> list[Any]:
    """Answers of the replicas of a deployment; failed ones are left out.

    Raises:
        TimeoutError: one of them did not answer.
    """
    handle: Any = serve.get_deployment_handle(deployment, app)
    asked = handle.broadcast(method)
    answers = await asked.results_async(timeout_s=timeout_s, return_exceptions=True)
    return [answer for answer in answers if not isinstance(answer, Exception)]


def of_any_size(handle: Any) -> Any:
    """Return a handle whose calls and answers may have any size. With Serve's throughput optimized,
    they would go over gRPC, which refuses more than 4 MB."""
    is_of_serve = isinstance(handle, DeploymentHandle)
    return handle.options(_by_reference=True) if is_of_serve else handle


async def proxy_answers(receive: Any, within_s: float) -> bool:
    """Return whether the proxy that passes on a body answers a question within this time, and no
    part of the body comes meanwhile. Such a proxy has read all that its client sent. If no proxy
    passes it on, nothing is between the application and its client, so this is true.

    Args:
        receive: the `receive` that the application got.
    """
    ask = getattr(receive, "_receive_asgi_messages", None)
    if ask is None:
        return True
    # The proxy has no such request, so it answers with KeyError at once.
    nobody = replace(receive._request_metadata, internal_request_id="")
    try:
        await asyncio.wait_for(ask(nobody), within_s)
    except KeyError:
        for _ in range(_TURNS):  # answers to earlier questions may have come just before
            await asyncio.sleep(0)
        return bool(receive.queue.empty())
    except Exception:  # it took too long, or the proxy is gone
        return False
    return False
