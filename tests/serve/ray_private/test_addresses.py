"""The address that Ray takes for "auto"."""

from types import SimpleNamespace

import pytest
from ray._private import services, utils
from ray.serve._private.common import DeploymentID, EndpointInfo
from ray.serve._private.http_util import RequestIdMiddleware
from ray.serve._private.proxy import HTTPProxy, gRPCProxy
from ray.serve._private.proxy_router import ProxyRouter

from ray_slo.serve.proxy.admission import AdmissionMiddleware
from ray_slo.serve.proxy.http import FailoverMiddleware
from ray_slo.serve.ray_private.addresses import PARTS, Routes, address_of_auto, clusters_of_auto


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch, tmp_path):
    """No cluster on this machine, no RAY_ADDRESS, and no note of `ray start` but the returned."""

    def none():
        return set()

    none.cache_clear = lambda: None
    monkeypatch.setattr(services, "find_gcs_addresses", none)
    monkeypatch.setattr(utils, "get_ray_address_file", lambda _: str(tmp_path / "noted"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path / "noted"


def test_no_cluster():
    with pytest.raises(ConnectionError):
        address_of_auto()


def test_what_ray_start_noted(nothing_runs):
    nothing_runs.write_text("127.0.0.1:1\n")
    assert address_of_auto() == "127.0.0.1:1"


def test_the_environment_comes_first(nothing_runs, monkeypatch):
    nothing_runs.write_text("127.0.0.1:1\n")
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:2")
    assert address_of_auto() == "ray://127.0.0.1:2"


def test_clusters_are_looked_for_anew(monkeypatch):
    cleared = []
    monkeypatch.setattr(services.find_gcs_addresses, "cache_clear", lambda: cleared.append(1))
    with pytest.raises(ConnectionError):
        address_of_auto()
    assert cleared == [1]


@pytest.fixture
def two_run(monkeypatch):
    def two():
        return {"127.0.0.1:4", "127.0.0.1:3"}

    two.cache_clear = lambda: None
    monkeypatch.setattr(services, "find_gcs_addresses", two)
    return sorted(two())


@pytest.mark.parametrize("named", [None, "", "auto"])
def test_ray_takes_any_of_several_clusters(named, two_run, monkeypatch):
    if named is not None:
        monkeypatch.setenv("RAY_ADDRESS", named)
    assert clusters_of_auto() == two_run
    assert address_of_auto() in two_run


def test_of_several_clusters_one_is_named(two_run, nothing_runs, monkeypatch):
    nothing_runs.write_text("127.0.0.1:1\n")
    assert clusters_of_auto() == []
    assert address_of_auto() == "127.0.0.1:1"
    nothing_runs.unlink()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")
    assert clusters_of_auto() == []
    assert address_of_auto() == "127.0.0.1:2"


def test_a_single_cluster_needs_no_name(monkeypatch):
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"127.0.0.1:3"})
    assert clusters_of_auto() == []


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
