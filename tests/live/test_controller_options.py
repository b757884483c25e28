"""Serve's `controller_options` put a cluster into the fast mode; Ray started without a variable."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from ray_slo.core.processes import NICENESS_ENV
from ray_slo.serve.deadlines import PROXY_CALLBACK_ENV
from ray_slo.serve.proxy import haproxy, modes

OURS = {modes.HAPROXY_ENV, modes.BINARY_ENV, modes.BUFFER_ENV, PROXY_CALLBACK_ENV, NICENESS_ENV}

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not modes.is_possible(), reason="there is no fast mode here"),
]


def asked(url):
    try:
        with urllib.request.urlopen(url, data=b'"hello"', timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return None, b""


def test_a_config_says_the_mode(tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in OURS}
    block = subprocess.run(
        [sys.executable, "-m", haproxy.__name__, "--yaml"], env=env, capture_output=True, check=True
    )
    (port,) = modes.free_ports(1)
    args = {
        "models": {"shout": {"callable": "tests.live.apps:Echo", "latency_slo_ms": 2000}},
        "workers": {"cpu": {"ray_actor_options": {"num_cpus": 0.1}}},
        "status_page": True,
    }
    config = yaml.safe_load(block.stdout) | {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [{"name": "a", "import_path": "ray_slo.serve:build_app", "args": args}],
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            [Path(sys.executable).with_name("serve"), "run", path], env=env, stdout=log, stderr=log
        ) as serving,
    ):
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + 200
        try:
            while asked(url)[0] != 200:
                assert serving.poll() is None and time.monotonic() < until, (
                    tmp_path / "log"
                ).read_text()
                time.sleep(0.5)
            with urllib.request.urlopen(f"{url}/-/status", timeout=10) as answer:
                shown = json.load(answer)
        finally:
            serving.terminate()  # a SIGINT is ignored where a shell started us in the background
            serving.wait(60)
    assert shown["mode"] == "fast (HAProxy)"
