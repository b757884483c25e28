"""Calls every replica of a deployment. The result of `DeploymentHandle.broadcast` is an alpha API;
`tests/serve/ray_private/test_peers.py` fails when it has changed.
"""

from __future__ import annotations

from typing import Any

from ray import serve


async def asked_all(app: str, deployment: str, method: str, timeout_s: float) -> list[Any]:
    """Answers of the replicas of a deployment; failed ones are left out.

    Raises:
        TimeoutError: one of them did not answer.
    """
    handle: Any = serve.get_deployment_handle(deployment, app)
    asked = handle.broadcast(method)
    answers = await asked.results_async(timeout_s=timeout_s, return_exceptions=True)
    return [answer for answer in answers if not isinstance(answer, Exception)]
