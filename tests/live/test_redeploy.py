"""Applications are deployed again under load. Every client hears its own answer, or a reason."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import late
import pytest
import requests
from loads import MAY_BE, Load
from ray import serve
from waiting import PATIENCE_S, eventually

from ray_slo.errors import UnknownModel
from ray_slo.serve import build_app
from ray_slo.serve.errors import error_of
from ray_slo.serve.proxy import modes

SLO_MS = 1000
GAP_S = 0.05
# Beside the refusals of any overload.
WHILE_IT_STARTS = {"starting", "no_worker", "frontend_lost", "worker_lost"}


def release(said, name="m", callable_="apps:Tagged", workers=1, slo_ms=SLO_MS, **options):
    """An application that answers [item, said]."""
    return build_app(
        {
            "models": {name: {"callable": callable_, "latency_slo_ms": slo_ms, "args": [said]}},
            "workers": {
                "default": {"num_replicas": workers, "ray_actor_options": {"num_cpus": 0.1}}
            },
            "profile_seconds": 0.2,
            "name": "app",
            **options,
        }
    )


class Clients:
    """Clients over HTTP, each with a thread; `heard` counts what they hear."""

    def __init__(self, url):
        self.url, self.pool, self.heard = url, ThreadPoolExecutor(300), Counter()

    def load(self):
        return Load(self._send, GAP_S, lambda n, answer: answer[0] == n)

    def _send(self, number):
        return Posted(self.pool.submit(self._ask, number))

    def _ask(self, number):
        answer = requests.post(self.url, json=number, timeout=PATIENCE_S)
        if answer.status_code == 200:
            self.heard[answer.json()[1]] += 1
            return answer.json()
        if answer.status_code == 404:  # of Serve's own, in words, or of the application
            self.heard["not there"] += 1
            raise UnknownModel
        reason = answer.json()["reason"]
        self.heard[reason] += 1
        raise error_of(reason)(answer.text, reason=reason)


class Posted:
    """An answer that is on its way."""

    def __init__(self, future):
        self._future = future

    def result(self, timeout_s):
        return self._future.result(timeout_s)


@pytest.fixture
def clients(ray_cluster, request):
    """Clients of the path that has the test's name."""
    path = request.node.name.translate(str.maketrans("[]", "--"))
    clients = Clients(f"{ray_cluster.url}/{path}/")
    clients.name = path
    yield clients
    late.WAIT.unlink(missing_ok=True)
    clients.pool.shutdown()
    serve.delete(path, _blocking=False)


def deploy(clients, app):
    serve.run(app, name=clients.name, route_prefix=f"/{clients.name}")


# One of them per mode, as each takes as long as several deployments.
@pytest.mark.parametrize("is_deleted", [modes.has_haproxy_of_ours()])
def test_with_its_only_frontend_replaced_nobody_waits_for_the_next(clients, is_deleted):
    deploy(clients, release("first"))
    with clients.load() as load:
        assert eventually(lambda: clients.heard["first"] > 5)
        late.WAIT.touch()
        if is_deleted:
            serve.delete(clients.name)
        app = release("second", name="n", callable_="late:Late")
        deploying = threading.Thread(target=deploy, args=(clients, app))
        deploying.start()
        lost = eventually(
            lambda: clients.heard["expired"] + clients.heard["frontend_lost"] > 20, 25.0
        )
        late.WAIT.unlink()
        deploying.join()
        assert eventually(lambda: clients.heard["second"] > 5)
    assert lost  # while there was none
    allowed = {"ok", "unknown_model", *MAY_BE, *WHILE_IT_STARTS}
    assert set(load.outcomes) <= allowed, Counter(load.outcomes)
    assert ("unknown_model" in load.outcomes) == is_deleted


def test_with_two_frontends_everything_may_change_at_once(clients):
    deploy(clients, release("first", workers=2, num_frontends=2))
    with clients.load() as load:
        assert eventually(lambda: clients.heard["first"] > 5)
        other = {"num_frontends": 2, "policy": "eager", "slo_ms": 3 * SLO_MS}
        deploy(clients, release("second", name="n", **other))
        assert eventually(lambda: clients.heard["second"] > 5)
    assert set(load.outcomes) <= {"ok", *MAY_BE, *WHILE_IT_STARTS}, Counter(load.outcomes)
