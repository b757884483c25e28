"""`deployments:` of Serve's config file beside `args`."""

import httpx
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from waiting import eventually

NAME = "settings"
WORKER = f"{NAME}-cpu-worker"
PATIENCE_S = 150  # replicas start several times
BOUND = {"name": WORKER, "max_ongoing_requests": 5}


def deploy(*deployments):
    """As `serve deploy` does."""
    application = {
        "name": NAME,
        "route_prefix": f"/{NAME}",
        "import_path": "ray_slo.serve:build_app",
        "args": {
            "models": {"echo": {"callable": "apps:Echo", "latency_slo_ms": 30_000}},
            "workers": {"cpu": {"ray_actor_options": {"num_cpus": 0.1}}},
            "name": NAME,
        },
        "deployments": list(deployments),
    }
    client = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


def state():
    return serve.status().applications[NAME]


def runs():
    return eventually(lambda: state().status == "RUNNING", PATIENCE_S)


def is_said(text):
    """Whether Serve shows this text as the reason why a frontend does not start."""

    def is_there():
        seen = state().deployments.get(NAME)
        return seen is not None and text in seen.message

    return eventually(is_there, PATIENCE_S)


def test_settings_that_do_not_fit(ray_cluster):
    """At first the frontend refuses to start. Later it goes on, and says what is wrong."""
    url = f"{ray_cluster.url}/{NAME}/"
    try:
        deploy(BOUND)
        assert is_said(f"ConfigError: deployments: {WORKER}: max_ongoing_requests is 5; leave it")
        deploy()
        assert runs()

        handle = serve.get_app_handle(NAME)

        def refused():
            return handle.slo_status.remote().result().get("refused_settings")

        deploy(BOUND)
        assert eventually(refused)[0].startswith(f"deployments: {WORKER}: max_ongoing_requests")
        assert httpx.post(url, json=1, timeout=60).json() == "1"
        deploy({"name": NAME, "num_replicas": 2})
        assert is_said("num_frontends: 2")
        assert httpx.post(url, json=1, timeout=60).json() == "1"
        deploy({"name": WORKER, "num_replicas": 2})  # Serve can do this for us
        assert runs()
        assert eventually(lambda: not refused())
    finally:
        serve.delete(NAME, _blocking=False)
