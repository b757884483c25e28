"""Serve's default HTTP host with HAProxy, which ours replaces."""

import os
import subprocess
import sys

import pytest

CODE = """
from ray.serve.config import HTTPOptions
print(HTTPOptions().host)
from ray_slo.serve.ray_private.http_host import loopback_by_default
loopback_by_default()
print(HTTPOptions().host, HTTPOptions(port=9).host, HTTPOptions(host="0.0.0.0").host)
"""


@pytest.mark.parametrize(("haproxy", "of_serve"), [("0", "127.0.0.1"), ("1", "0.0.0.0")])
def test_loopback_unless_told_otherwise(haproxy, of_serve):
    """Serve reads the mode when it is imported: hence a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "RAY_SERVE_ENABLE_HA_PROXY": haproxy},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [of_serve, "127.0.0.1", "127.0.0.1", "0.0.0.0"]
