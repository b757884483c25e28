"""The environment of a frontend. In a replica it comes from Serve; tests make their own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ray import serve

from ray_slo.serve.errors import BadInput
from ray_slo.serve.frontend.startup import Deployment, in_a_line
from ray_slo.serve.memory import give_back, settle
from ray_slo.serve.proxy.door import mode_in_words
from ray_slo.serve.proxy.modes import has_door_before
from ray_slo.serve.ray_private.actors import bring_forward
from ray_slo.serve.ray_private.context import answer_only, count_only, install
from ray_slo.serve.ray_private.deploy import serve_details
from ray_slo.serve.ray_private.replica_port import listen_on_node_only
from ray_slo.serve.suspects import ended_itself
from ray_slo.serve.watch.metrics import FrontendMetrics

logger = logging.getLogger(__name__)

_OF_CLIENTS = ("__call__", "Infer", "Describe")  # what Serve's counters count


def worker_states(app: str, deployments: Mapping[str, str]) -> dict[str, Deployment]:
    """Return Serve's view of an application's workers. This call blocks.

    Args:
        deployments: names of the deployments by kind of worker.
    """
    state = serve.status().applications.get(app)
    found = {}
    for kind, name in deployments.items():
        if state is not None and (seen := state.deployments.get(name)) is not None:
            running = sum(n for s, n in seen.replica_states.items() if s == "RUNNING")
            failed = seen.status == "DEPLOY_FAILED"
            starting = sum(seen.replica_states.get(s, 0) for s in ("STARTING", "UPDATING"))
            # A replica that cannot start has another trigger.
            upscaling = seen.status == "UPSCALING" and seen.status_trigger == "AUTOSCALING"
            none = running + starting == 0 and seen.status in ("HEALTHY", "DOWNSCALING")
            message = "" if upscaling or none else in_a_line(seen.message, failed)
            found[kind] = Deployment(running, starting, message, failed, upscaling or none)
    return found


def check_method(deployment: str, method: str) -> None:
    """Check that callers may call a method of a frontend.

    Raises:
        BadInput: they may not. The message is in the words of the user's class.
    """
    if method not in _OF_CLIENTS and not method.startswith("slo_"):
        raise BadInput(
            f"{deployment!r} answers no call of {method!r}: handle.remote(item) runs the class's "
            "__call__ on batches of items; for another method, make a deployment of its own, or "
            "one application with several models (handle.remote(item, model='…'))"
        )


class Demand(Protocol):
    """The methods by which a planner learns of requests."""

    def arrived(self, stream: str, count: int = 1) -> None: ...
    def sized(self, model: str, size: int) -> None: ...
    def waits(self, stream: str, count: int) -> None: ...
    def bad(self, stream: str, count: int = 1) -> None: ...
    def finished(self, variant: str, made: Mapping[str, int] | None = None) -> None: ...


@dataclass(frozen=True)
class Surroundings:
    """The environment of a frontend.

    Attributes:
        app, deployment, client: names of the application, of the frontend's deployment, and of
            the frontend itself.
        details: function that returns what Serve's controller says of all applications. It blocks.
        states: function that returns Serve's view of an application's workers. It blocks.
        ended_itself: function that returns the note that a worker wrote when it ended itself. Empty
            if there is none.
        has_door_before: whether Serve's proxy, or HAProxy, has a door.
        demand: object that gets the requests. Default: the planner, if there is one.
    """

    app: str
    deployment: str
    client: str
    metrics: FrontendMetrics
    details: Callable[[], Mapping[str, Any]] = serve_details
    states: Callable[[str, Mapping[str, str]], dict[str, Deployment]] = worker_states
    ended_itself: Callable[[str], str] = ended_itself
    has_door_before: bool = False
    demand: Demand | None = None

    @staticmethod
    def of_replica() -> Surroundings:
        """Return the environment of this process, which is a Serve replica."""
        listen_on_node_only()
        bring_forward()
        install()  # it refuses WebSockets
        count_only(_OF_CLIENTS)
        give_back()
        settle()
        context = serve.get_replica_context()
        answer_only(functools.partial(check_method, context.deployment))
        logger.info("mode: %s", mode_in_words())
        names = context.app_name, context.deployment, context.replica_tag
        return Surroundings(*names, FrontendMetrics(), has_door_before=has_door_before())
