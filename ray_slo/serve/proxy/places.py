"""Places: what a request asks for, in one form. Proxies count, sort and admit requests by place.

Clients can write one place in many ways: `/p/m`, `/p//m/` and `/p/%6d` reach the same model. What
counts is what the frontend understands (`name_in`), at the application that Serve finds
(`ray_private.addresses`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ray_slo.serve.deadlines import slo_class_of
from ray_slo.serve.frontend.http import name_in
from ray_slo.serve.ray_private.addresses import Routes

_SERVES_OWN = ("/-/healthz", "/-/routes")


class Place(NamedTuple):
    """What a request asks for.

    Attributes:
        route: route prefix of the application. None: there is no application. Empty: it is not
            known which one, or it is Serve itself.
        name: name of a model or a pipeline, as the client wrote it. Empty: the only one.
        slo_class: SLO class, as the client wrote it. Empty: none.
    """

    route: str | None
    name: str = ""
    slo_class: str = ""


def place_of(routes: Routes, scope: Any) -> Place:
    """Return the place of an HTTP request."""
    path, slo_class = (
        scope["path"][len(scope.get("root_path", "")) :],
        slo_class_of(scope["headers"]),
    )
    if not routes.are_known or path in _SERVES_OWN:
        return Place("", name_in(path), slo_class)
    route = routes.of_path(path)
    return Place(route, name_in(path, route or ""), slo_class)


def place_of_call(routes: Routes, application: str, model: str, metadata: Any) -> Place:
    """Return the place of a gRPC call.

    Args:
        application: name of the application in its metadata.
        model: name of the model or the pipeline in its message.
        metadata: the call's metadata.
    """
    route = routes.of_application(application) if routes.are_known else ""
    return Place(route, model, slo_class_of(metadata))
