"""Fails when Serve has changed how its proxies find applications."""

from types import SimpleNamespace

import pytest
from ray.serve._private.common import DeploymentID, EndpointInfo
from ray.serve._private.http_util import RequestIdMiddleware
from ray.serve._private.proxy import HTTPProxy, gRPCProxy
from ray.serve._private.proxy_router import ProxyRouter

from ray_slo.serve.proxy.admission import AdmissionMiddleware
from ray_slo.serve.proxy.http import FailoverMiddleware
from ray_slo.serve.ray_private.routes import PARTS, Routes


@pytest.fixture
def router():
    router = ProxyRouter(lambda endpoint, info: SimpleNamespace())
    named = {"a": "/", "b": "/p", "c": "/p/q"}
    router.update_routes(
        {DeploymentID(name="x", app_name=a): EndpointInfo(route=r) for a, r in named.items()}
    )
    return router


def proxy_of(kind, router):
    proxy = kind.__new__(kind)
    proxy.proxy_router = router
    return proxy


def test_the_table_is_serves(router):
    assert all(hasattr(ProxyRouter, part) for part in PARTS)
    app = RequestIdMiddleware(proxy_of(HTTPProxy, router))
    for around in (app, FailoverMiddleware(app), AdmissionMiddleware(FailoverMiddleware(app))):
        routes = Routes(around)
        assert routes.are_known
        paths = ("/", "/x", "/p", "/p/", "/px", "/p/qx", "/p/q/m", "//p")
        assert [routes.of_path(path) for path in paths] == [
            *("/", "/", "/p", "/p", "/", "/p", "/p/q", "/")
        ]


def test_calls_over_grpc_find_it(router):
    proxy = proxy_of(gRPCProxy, router)
    routes = Routes(proxy.service_handler_factory.__self__)
    assert [routes.of_application(name) for name in ("b", "made up", "")] == ["/p", None, None]


def test_where_it_is_not_nothing_is_known():
    for other in (None, object(), SimpleNamespace(proxy_router=object())):
        routes = Routes(other)
        assert not routes.are_known
        assert routes.of_path("/p") is routes.of_application("p") is None
