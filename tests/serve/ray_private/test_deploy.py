"""Versions of deployments, how our applications are recognised, and Serve's default host."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ray import serve
from ray.serve._private import client as serve_client
from ray.serve._private.config import DeploymentConfig
from ray.serve.schema import _deployment_info_to_schema

from ray_slo.serve.ray_private import deploy

HOSTS = """
from ray.serve.config import HTTPOptions
print(HTTPOptions().host)
from ray_slo.serve.ray_private.deploy import loopback_by_default
loopback_by_default()
print(HTTPOptions().host, HTTPOptions(port=9).host, HTTPOptions(host="0.0.0.0").host)
"""


def details(routers):
    """What Serve's controller says of an application "app" with these deployments and routers."""
    deployments = {}
    for name, router in routers.items():
        config = (
            DeploymentConfig() if router is None else DeploymentConfig(request_router_config=router)
        )
        config = DeploymentConfig.from_proto_bytes(config.to_proto_bytes())
        replica = SimpleNamespace(
            ray_actor_options={},
            max_replicas_per_node=None,
            placement_group_bundles=None,
            placement_group_strategy=None,
            placement_group_bundle_label_selector=None,
            placement_group_fallback_strategy=None,
        )
        info = SimpleNamespace(deployment_config=config, replica_config=replica)
        schema = _deployment_info_to_schema(name, info)
        deployments[name] = {"deployment_config": schema.model_dump(exclude_unset=True)}
    return {"applications": {"app": {"deployments": deployments}}}


def test_an_application_is_known_by_the_routers_of_its_workers(monkeypatch):
    """Where this fails, Serve has changed: see what its controller says of routers now."""
    ours = {"x-foo": None, "x-foo-gpu-worker": deploy.router_of("x-foo"), "x": None}
    for said, found in (
        (details(ours), {"app": "x-foo"}),
        (details({"x": None, "x-foo-worker": None}), {}),
        ({}, {}),
    ):
        monkeypatch.setattr(deploy, "serve_details", lambda said=said: said)
        assert deploy.frontends() == found


def test_ray_changed_here():
    """Where this fails, Serve has changed: see how a deployment keeps its version now."""

    @serve.deployment
    class Plain:
        pass

    assert deploy.versioned(Plain, "v1")._version == "v1"


def test_frontends_have_one_event_loop():
    """Where the first assertion fails, Serve has another variable for it now."""
    from ray.serve._private import constants

    assert hasattr(constants, deploy._USER_LOOP_ENV)
    assert deploy.on_one_loop({"num_cpus": 1}) == {
        "num_cpus": 1,
        "runtime_env": {"env_vars": {deploy._USER_LOOP_ENV: "0"}},
    }
    own = {"runtime_env": {"pip": ["x"], "env_vars": {"A": "1", deploy._USER_LOOP_ENV: "1"}}}
    assert deploy.on_one_loop(own) == own
    for wrong in ({"runtime_env": "x"}, {"runtime_env": {"env_vars": "x"}}):
        assert deploy.on_one_loop(wrong) == wrong


@pytest.mark.slow
@pytest.mark.parametrize(("haproxy", "of_serve"), [("0", "127.0.0.1"), ("1", "0.0.0.0")])
def test_loopback_unless_told_otherwise(haproxy, of_serve):
    """Serve reads the mode when it is imported: hence a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", HOSTS],
        env={**os.environ, "RAY_SERVE_ENABLE_HA_PROXY": haproxy},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [of_serve, "127.0.0.1", "127.0.0.1", "0.0.0.0"]


def test_what_fails_is_explained_by_serve_run(monkeypatch):
    """Where the first assertion fails, Serve has changed: see where `serve.run` waits now."""
    assert callable(serve_client.ServeControllerClient._wait_for_application_running)

    class Client:
        def _wait_for_application_running(self, name, timeout_s=-1):
            if name != "runs":
                raise RuntimeError("Failed to update the deployments ['m-worker'].")

    states = {
        "m-worker": SimpleNamespace(status="DEPLOY_FAILED", message="because"),
        "m": SimpleNamespace(status="HEALTHY", message=""),
    }
    status = SimpleNamespace(applications={"ours": SimpleNamespace(deployments=states)})
    monkeypatch.setattr(deploy, "serve_client", SimpleNamespace(ServeControllerClient=Client))
    monkeypatch.setattr(deploy, "serve", SimpleNamespace(status=lambda: status))
    monkeypatch.setattr(deploy, "frontends", lambda: {"ours": "m"})
    for _ in range(2):  # installed once
        deploy.explain_failures(str.upper)
    Client()._wait_for_application_running("runs")
    for name, said in (("ours", " m-worker: BECAUSE"), ("another's", "")):
        with pytest.raises(RuntimeError) as failed:
            Client()._wait_for_application_running(name, timeout_s=1)
        assert str(failed.value) == f"Failed to update the deployments ['m-worker'].{said}"
    monkeypatch.setattr(deploy, "serve_client", None)
    deploy.explain_failures(str.upper)
