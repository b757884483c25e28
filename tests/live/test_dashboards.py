"""A real Prometheus scrapes Ray, and answers every query of the dashboard and of the rules."""

import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time

import httpx
import pytest
import ray
import yaml
from waiting import eventually

from ray_slo.cli import main
from ray_slo.errors import SLOError
from ray_slo.serve import build_app

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None,
    reason="prometheus and promtool are not installed (Debian: prometheus)",
)
NAME = "metered"
ARGS = {
    "models": {
        "m": {
            "callable": "apps:Named",
            "variants": {
                "quick": {"load": "apps:Network", "args": ["quick", 0.01], "accuracy": 70}
            },
            "latency_slo_ms": 1000,
        }
    },
    "workers": {"small": {"ray_actor_options": {"num_cpus": 0.1}}},
    "profile_seconds": 0.3,
}
# Metrics without data here: this application has no preemption, planner, groups or rehearsals. It
# has enough memory, and loses nothing.
WITHOUT = "preemption|plan|replicas|group_|out_of_memory|expected|unclaimed|rehearsal|auto_"


class Prometheus:
    def __init__(self, folder, rules):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._api = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=20)
        config = folder / "prometheus.yml"
        config.write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(rules)],
                    "scrape_configs": [
                        {"job_name": "ray", "static_configs": [{"targets": _ray_exports()}]}
                    ],
                }
            )
        )
        self._process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ]
        )

    def get(self, path, **params):
        """The data of Prometheus' answer; a query's error fails the test."""
        answer = self._api.get(path, params=params).json()
        assert answer["status"] == "success", (params, answer)
        return answer["data"]

    def values(self, query):
        return [float(s["value"][1]) for s in self.get("query", query=query)["result"]]

    def close(self):
        self._api.close()
        self._process.terminate()
        self._process.wait(30)


def _ray_exports():
    """Ray's addresses of metrics, as in the file that its dashboard writes, but on loopback."""
    return [f"127.0.0.1:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]


def _filled_in(query):
    """Fill in the variables as Grafana does when "All" is selected."""
    query = query.replace("$__rate_interval", "30s").replace('"$Application"', f'"{NAME}"')
    return re.sub(r"\$[A-Z]\w+", ".*", query)


@contextlib.contextmanager
def _asking(handle):
    """Send requests of two callers. One caller's are answered, unless the machine is too busy."""
    enough = threading.Event()

    def ask():
        while not enough.is_set():
            for slo_ms in (None, 1):
                with contextlib.suppress(SLOError):
                    handle.remote(1, latency_slo_ms=slo_ms).result()
            time.sleep(0.3)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def _until(holds, what):
    assert eventually(holds, within_s=150), what()


@pytest.mark.timeout(400)
def test_a_real_prometheus_answers(ray_cluster, tmp_path):
    with pytest.raises(SystemExit) as left:
        main(["dashboards", "--out", str(tmp_path), "--objective", "0.95"])
    assert left.value.code == 0
    rules = tmp_path / "slo_rules.yml"
    subprocess.run([PROMTOOL, "check", "rules", str(rules)], check=True, capture_output=True)
    made = json.loads((tmp_path / "slo_grafana_dashboard.json").read_text("utf-8"))
    queries = {
        (panel["title"], target["refId"]): _filled_in(target["expr"])
        for panel in made["panels"]
        for target in panel.get("targets", ())
    }
    assert len(queries) > 25
    mute = {q for q in queries.values() if re.search(f"ray_serve_slo_({WITHOUT})", q)}
    assert len(mute) < 15

    prometheus = Prometheus(tmp_path, rules)
    try:
        with ray_cluster.running(build_app(ARGS), NAME, f"/{NAME}") as handle, _asking(handle):
            _answers(prometheus, queries, mute)
            _variables_have_values(prometheus, made)
            _rules_hold(prometheus)
    finally:
        prometheus.close()


def _answers(prometheus, queries, mute):
    missing = {**queries}

    def asked():
        for panel, query in list(missing.items()):
            with contextlib.suppress(httpx.TransportError):  # not up yet
                values = prometheus.values(query)
                if query in mute or any(map(math.isfinite, values)):
                    del missing[panel]
        return not missing

    _until(asked, lambda: f"no data for {missing}")


def _variables_have_values(prometheus, made):
    for variable in made["templating"]["list"]:
        if variable["name"] in ("datasource", "Cluster"):  # the latter is KubeRay's
            continue
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
        series, label = _filled_in(asked[1]), asked[2]
        values = prometheus.get(f"label/{label}/values", **{"match[]": series})
        assert values, variable["name"]


def _rules_hold(prometheus):
    groups = prometheus.get("rules")["groups"]
    found = [rule for group in groups for rule in group["rules"]]
    assert len(found) == 11
    for rule in found:
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule
    # Half of the requests are refused.
    recorded = f'ray_slo:bad_share:rate5m{{application="{NAME}"}}'
    _until(
        lambda: any(0.2 < share < 0.8 for share in prometheus.values(recorded)),
        lambda: prometheus.values(recorded),
    )
