"""The rules that `haproxy` adds to HAProxy's configuration. They decide whether a request waits,
passes or is refused, where, and for how long.

A request has variables `txn.slo_…`. Three of them come from the frontends of its place: `rate` is
the requests per second that the workers and the frontends can serve, `ms` the SLO in milliseconds,
and `most` the number of requests that the frontends keep. `left` is the request's time in
milliseconds.

Clients can write one path in many ways, and make up paths and classes. So a request is counted by
its place, which is its backend, its path in one form, and its class. A place has an entry only if a
frontend has confirmed it. All requests of an application to other places are counted together.

A plain deployment with `@ray_slo.batch` functions has places, too, without classes. Their requests
are limited in number. For all else, HAProxy treats such a deployment as before.
"""

from __future__ import annotations

from collections.abc import Iterator

from ray_slo.core.environment import MARK
from ray_slo.serve.deadlines import (
    ANSWERED_S,
    ARRIVED_HEADER,
    ATTEMPT_HEADER,
    BATCH_HEADER,
    CAPACITY_HEADER,
    CLASS_HEADER,
    KNOWN_HEADER,
    LATE_BODY_S,
    LATENCY_HEADER,
    MARK_HEADER,
    NO_PLACE,
    PROXIED_HEADER,
    REFUSED_HEADER,
    TIMEOUT_HEADER,
    WAY_HEADER,
    WHOLE_HEADER,
)
from ray_slo.serve.proxy.gate import FEW, MOST, OURS_S, PACE_S, PLACES_KEPT

RETRIES = 5  # a single dead frontend is marked down at the third; Serve's proxy then takes over
GRPC_PATH = "/ray_slo.v1.Inference/"
_GRACE_MS = round(1e3 * ANSWERED_S)
_STRANGERS = 64  # this many requests that no frontend has answered may be on their way
_LONG = 2  # from this multiple of the model's SLO on, a request's time is long
_PLACES = "rayslo_places"  # table of the facts in a place's answers
_APPS = "rayslo_apps"  # table of the backends of applications of ray-slo
_BATCHES = "rayslo_batches"  # table of what one replica with batch functions can do, by path
_INSIDE = "rayslo_inside"  # table of requests in progress, by path and kind
_KEPT = "1d"  # how long after its last use a place is known
_LATE_MS = round(1e3 * LATE_BODY_S)
_BODY_MS = (500, 1000, 2000, 5000, 10_000, 60_000)  # possible time limits of a body in HAProxy
_PACE, _PACE_MS = 1.5, round(1e3 * PACE_S)  # see `Gate`
_HEAD_BYTES = 8192  # bytes of a buffer that the head and HAProxy itself need

_SET = "http-request set-var"
_KNOWN = "{ var(txn.slo_rate) -m int gt 0 }"  # an application of ray-slo with a known capacity
_OURS = "{ var(txn.slo_ms) -m int gt 0 }"  # a place at an application of ray-slo
_CONFIRMED = f"{{ res.hdr({CAPACITY_HEADER}) -m sub ; }}"  # by the frontend that answers


def tables() -> str:
    """Return the sections with the tables of places, applications, and requests in progress."""
    tables = {
        _PLACES: f"len 512 size {PLACES_KEPT} expire {_KEPT} store gpt(3),gpc0",
        _BATCHES: f"len 512 size {PLACES_KEPT} expire {OURS_S:g}s store gpt(2)",
        _APPS: f"len 256 size {PLACES_KEPT} expire {OURS_S:g}s store gpc0",
        _INSIDE: f"len 512 size {4 * PLACES_KEPT} expire {_KEPT} "
        f"store conn_cur,gpc0_rate({_PACE_MS}ms)",
    }
    return "".join(
        f"\nbackend {name}\n    stick-table type string {table}\n" for name, table in tables.items()
    )


def of_frontend(clock: str, *, is_grpc: bool = False) -> Iterator[str]:
    """Yield the rules for all requests. Headers that only ray-slo may set are removed first.

    Args:
        clock: name of the clock. Frontends with another clock ignore the time.
        is_grpc: whether they are calls, whose services would see a header about bodies.
    """
    for header in (PROXIED_HEADER, REFUSED_HEADER, WAY_HEADER, KNOWN_HEADER):
        yield f"http-request del-header {header}"
    whole = f"del-header {WHOLE_HEADER}" if is_grpc else f"set-header {WHOLE_HEADER} 0"
    yield f"http-request {whole}"
    if MARK.read():  # HAProxy reads it from its environment, so it is in no file
        yield f'http-request set-header {MARK_HEADER} "${{{MARK.name}}}"'
    else:
        yield f"http-request del-header {MARK_HEADER}"
    yield f"http-request set-header {ARRIVED_HEADER} %[date(0,us)];{clock}"
    yield f"http-request set-header {ATTEMPT_HEADER} %[uuid]"


def of_backend(buffer_bytes: int, wait_s: float) -> Iterator[str]:
    """Yield the rules for an application's backend.

    Args:
        buffer_bytes: size of HAProxy's buffer. A request that fits can be sent again.
        wait_s: time for which a request without a deadline waits for a frontend beyond the model's
            SLO, in seconds.
    """
    yield from _again()
    yield from _what_is_known()
    # While no frontend is up, Serve's proxy gets the requests, and answers at their deadline.
    yield f"http-request set-header {KNOWN_HEADER} %[var(txn.slo_ms)] if {_OURS}"
    yield from _time(wait_s)
    yield f"http-request disable-l7-retry unless {_OURS}"
    yield from _small_bodies(buffer_bytes - _HEAD_BYTES)
    yield from _door()
    yield from _strangers()
    yield from _batches()
    is_counted = "{ var(txn.slo_key) -m found }"
    yield f"http-request track-sc0 var(txn.slo_key) table {_INSIDE} if {is_counted}"
    yield f"http-request sc-inc-gpc0(0) if {is_counted}"
    yield f"http-response track-sc1 var(txn.slo_place) table {_PLACES} if {_CONFIRMED}"
    for i in range(3):
        yield (
            f"http-response sc-set-gpt({i},1) res.hdr({CAPACITY_HEADER}),field({i + 1},;),mul(1) "
            f"if {_CONFIRMED}"
        )
    is_ours = f"if {_CONFIRMED} or {{ res.hdr({CAPACITY_HEADER}) -m str {NO_PLACE} }}"
    yield f"http-response track-sc2 var(txn.slo_app) table {_APPS} {is_ours}"
    has_batch = f"{{ res.hdr({BATCH_HEADER}) -m found }} !{_OURS}"
    yield f"http-response track-sc1 var(txn.slo_path) table {_BATCHES} if {has_batch}"
    for i in range(2):
        value = f"res.hdr({BATCH_HEADER}),field({i + 2},;),mul(1)"
        yield f"http-response sc-set-gpt({i},1) {value} if {has_batch}"
    yield from (f"http-response del-header {h}" for h in (CAPACITY_HEADER, BATCH_HEADER))


def of_grpc_backend() -> Iterator[str]:
    """Yield the rules for the backend of an application's gRPC. Its admission control is in the
    frontends (`grpc`). Calls of other services may stream, and perhaps must not be repeated."""
    yield from _again()
    yield f"http-request disable-l7-retry unless {{ path_beg {GRPC_PATH} }}"
    yield f"http-request wait-for-body time 10s if {{ path_beg {GRPC_PATH} }}"


def _again() -> Iterator[str]:
    """Send a request to another frontend if one closes the connection without an answer."""
    yield "retry-on conn-failure empty-response"
    yield f"retries {RETRIES}"


def _what_is_known() -> Iterator[str]:
    """Read the facts of a path, and of an SLO class there."""
    yield f"{_SET}(txn.slo_app) be_name"
    yield f"{_SET}(txn.slo_class) req.fhdr({CLASS_HEADER})"
    # As frontends read it: decoded, and slashes at its end or side by side mean nothing.
    yield f"{_SET}(txn.slo_name) path,url_dec,regsub('/+','/',g),regsub('/$','')"
    yield f"{_SET}(txn.slo_path) var(txn.slo_app),concat(,txn.slo_name)"
    yield f"{_SET}(txn.slo_place) var(txn.slo_path),concat(@,txn.slo_class)"
    for i, name in enumerate(("rate", "ms", "most")):
        yield f"{_SET}(txn.slo_{name}) var(txn.slo_place),table_gpt({i},{_PLACES})"
    yield f"http-request track-sc1 var(txn.slo_place) table {_PLACES} if {_OURS}"


def _time(wait_s: float) -> Iterator[str]:
    """Set the time of a request, and how long its client waits. A timeout can only shorten the
    model's SLO. A request's own SLO replaces it."""
    own, timeout = f"req.hdr({LATENCY_HEADER})", f"req.hdr({TIMEOUT_HEADER})"
    # HAProxy counts in whole numbers: seconds become milliseconds by moving the point.
    point = 'regsub("[.]([0-9][0-9][0-9]).*","\\1")'
    millis = f"'{timeout},concat(000),{point},mul(1)'"
    is_own = f"{{ {own} -m found }}"
    yield f"{_SET}(txn.slo_left) var(txn.slo_ms)"
    yield f"{_SET}(txn.slo_wait) var(txn.slo_ms),add({round(1e3 * wait_s)}) if {_OURS}"
    yield f"{_SET}(txn.slo_timeout) {millis} if {{ {timeout} -m found }}"
    is_timeout = "{ var(txn.slo_timeout) -m int gt 0 }"
    yield f"{_SET}(txn.slo_wait) var(txn.slo_timeout),add({_GRACE_MS}) if {is_timeout}"
    # A timeout of 0 means that the client wants to wait.
    yield f"{_SET}(txn.slo_wait) int(0) if {{ var(txn.slo_timeout) -m int 0 }} !{is_own}"
    yield f"{_SET}(txn.slo_tighter) var(txn.slo_timeout),sub(txn.slo_ms)"
    is_tighter = "{ var(txn.slo_tighter) -m int lt 0 }"
    yield f"{_SET}(txn.slo_left) var(txn.slo_timeout) if {is_timeout} {is_tighter}"
    yield f"{_SET}(txn.slo_left) {own},mul(1) if {is_own}"
    # If it is no number, the frontend refuses the request with the reason.
    is_number = "{ var(txn.slo_left) -m int gt 0 }"
    yield f"{_SET}(txn.slo_wait) var(txn.slo_left),add({_GRACE_MS}) if {is_own} {is_number}"
    yield "http-request set-timeout server var(txn.slo_wait) if { var(txn.slo_wait) -m int gt 0 }"


def _small_bodies(most_bytes: int) -> Iterator[str]:
    """Wait for a body that fits into the buffer before its request passes. Its time limit is the
    request's."""
    declared = "{ req.hdr_val(content-length) gt 0 }"
    small = f"{_OURS} {declared} {{ req.hdr_val(content-length) le {max(most_bytes, 0)} }}"
    yield f"{_SET}(txn.slo_body) var(txn.slo_left),add({_LATE_MS}) if {small}"
    least = 0
    for i, most in enumerate(_BODY_MS):
        last = i == len(_BODY_MS) - 1
        bound = f"{{ var(txn.slo_body) -m int gt {least} }}"
        if not last:
            bound += f" {{ var(txn.slo_body) -m int le {most} }}"
        yield f"http-request wait-for-body time {most}ms if {bound}"
        least = most
    yield f"http-request set-header {WHOLE_HEADER} 1 if {small}"


def _door() -> Iterator[str]:
    body = (
        '{"error": "RefusedEarly", "reason": "queue_full", "message": '
        '"%[var(txn.slo_ahead)] requests are on their way; in %[var(txn.slo_left)] ms about '
        '%[var(txn.slo_can)] can be answered", "retry_after_s": %[var(txn.slo_again)]}'
    )
    is_long = "{ var(txn.slo_more) -m int gt 0 }"
    refused = f"{_KNOWN} {{ var(txn.slo_over) -m int ge 0 }}"
    yield f"{_SET}(txn.slo_kind) str(short)"
    yield f"{_SET}(txn.slo_long) var(txn.slo_ms),mul({_LONG})"
    yield f"{_SET}(txn.slo_more) var(txn.slo_left),sub(txn.slo_long)"
    yield f"{_SET}(txn.slo_kind) str(long) if {is_long}"
    yield f"{_SET}(txn.slo_left) var(txn.slo_long) if {is_long}"
    yield f"{_SET}(txn.slo_key) var(txn.slo_path),concat(:,txn.slo_kind) if {_OURS}"
    yield f"{_SET}(txn.slo_limit) var(txn.slo_most) if {_OURS}"
    yield from _crowd("var(txn.slo_rate)", "txn.slo_left", _OURS)
    yield f"{_SET}(txn.slo_again) var(txn.slo_ahead),div(txn.slo_rate),add(1)"
    yield f"http-request sc-inc-gpc0(1) if {refused}"
    yield (
        f"http-request return status 503 content-type application/json lf-string '{body}' "
        f"hdr retry-after %[var(txn.slo_again)] if {refused}"
    )
    yield f"{_SET}(txn.slo_refused) sc1_clr_gpc0 if {_OURS}"
    yield (
        f"http-request set-header {REFUSED_HEADER} %[var(txn.slo_refused)] "
        "if { var(txn.slo_refused) -m int gt 0 }"
    )


def _crowd(rate: str, left: str, condition: str) -> Iterator[str]:
    """Set `over` to 0 or more if a request is one too many. At most `limit` may be on their way, if
    it is set. This is the rule of `Gate`, but requests that a frontend refused do not count."""
    only = f" if {condition}"

    def is_(name: str, comparison: str, value: int = 0) -> str:
        return f"if {{ var(txn.slo_{name}) -m int {comparison} {value} }} {condition}"

    yield f"{_SET}(txn.slo_ahead) var(txn.slo_key),table_conn_cur({_INSIDE}){only}"
    yield f"{_SET}(txn.slo_can) {rate},mul({left}),div(1000){only}"
    yield f"{_SET}(txn.slo_more) var(txn.slo_can),sub({FEW}){only}"
    yield f"{_SET}(txn.slo_free) int({FEW}){only}"
    yield f"{_SET}(txn.slo_free) var(txn.slo_can) {is_('more', 'gt')}"
    yield f"{_SET}(txn.slo_bound) var(txn.slo_free),mul({MOST}){only}"
    yield f"{_SET}(txn.slo_spare) var(txn.slo_limit),sub(txn.slo_bound){only}"
    is_lower = f"{{ var(txn.slo_limit) -m found }} {condition}"
    yield f"{_SET}(txn.slo_bound) var(txn.slo_limit) {is_('spare', 'lt')} {is_lower}"
    yield f"{_SET}(txn.slo_over) var(txn.slo_ahead),sub(txn.slo_bound){only}"
    yield f"{_SET}(txn.slo_beyond) var(txn.slo_ahead),sub(txn.slo_free){only}"
    yield f"{_SET}(txn.slo_pace) {rate},mul({round(_PACE_MS * _PACE)}),div(1000){only}"
    yield f"{_SET}(txn.slo_pace) int(1) {is_('pace', 'lt', 1)}"
    lately = f"var(txn.slo_key),table_gpc0_rate({_INSIDE})"
    yield f"{_SET}(txn.slo_faster) {lately},sub(txn.slo_pace){only}"
    yield f"{_SET}(txn.slo_over) int(0) {is_('beyond', 'ge')} {{ var(txn.slo_faster) -m int ge 0 }}"


def _strangers() -> Iterator[str]:
    """Refuse requests of an application to places that it has not confirmed, beyond a few."""
    body = (
        '{"error": "RefusedEarly", "reason": "queue_full", "message": '
        f'"{_STRANGERS} requests for models, classes or paths that have not been answered yet are '
        'on their way", "retry_after_s": 1}'
    )
    is_strange = f"{{ var(txn.slo_app),in_table({_APPS}) }} !{_OURS}"
    yield f"{_SET}(txn.slo_key) var(txn.slo_app),concat(:strange) if {is_strange}"
    yield f"{_SET}(txn.slo_strange) var(txn.slo_key),table_conn_cur({_INSIDE}) if {is_strange}"
    yield (
        f"http-request return status 503 content-type application/json string '{body}' "
        f"hdr retry-after 1 if {{ var(txn.slo_strange) -m int ge {_STRANGERS} }}"
    )


def _batches() -> Iterator[str]:
    """Refuse requests beyond what functions with `@ray_slo.batch` can answer in time. Each replica
    speaks for itself, so its rate is multiplied by their number. Requests with a time of their own
    pass: the replica knows whether that is enough."""
    body = (
        '{"error": "RefusedEarly", "reason": "queue_full", "message": '
        '"%[var(txn.slo_ahead)] requests are on their way; in %[var(txn.slo_batch)] ms about '
        '%[var(txn.slo_can)] can be answered", "retry_after_s": 1}'
    )
    known = f"var(txn.slo_path),in_table({_BATCHES})"
    own = " ".join(f"!{{ req.hdr({h}) -m found }}" for h in (LATENCY_HEADER, TIMEOUT_HEADER))
    is_known = f"{{ {known} }} !{_OURS} {own}"
    yield f"{_SET}(txn.slo_batch) var(txn.slo_path),table_gpt(1,{_BATCHES}) if {is_known}"
    yield f"{_SET}(txn.slo_replicas) nbsrv"
    rate = f"var(txn.slo_path),table_gpt(0,{_BATCHES}),mul(txn.slo_replicas)"
    yield f"{_SET}(txn.slo_key) var(txn.slo_path),concat(:batch) if {is_known}"
    yield from _crowd(rate, "txn.slo_batch", is_known)
    yield (
        f"http-request return status 503 content-type application/json lf-string '{body}' "
        f"hdr retry-after 1 if {is_known} {{ var(txn.slo_over) -m int ge 0 }}"
    )
