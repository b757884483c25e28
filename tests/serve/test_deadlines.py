"""The headers with a request's deadline, and how each process passes them on."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.core.requests import MAX_LATENCY_MS
from ray_slo.errors import BadHeader
from ray_slo.serve.deadlines import (
    HEADERS,
    TimeLimits,
    deadline_scope,
    remaining_ms,
    slo_class_of,
    spent,
    without,
)

OWN, PROXIED, TIMEOUT = "x-slo-latency-ms", "x-slo-timeout-ms", "x-request-timeout-seconds"
CLASS = "x-slo-class"


def latency_ms_of(pairs):
    """As a frontend reads it for a model with an SLO of 1 s; None: what the model says."""
    limits = TimeLimits(pairs, strict=True)
    return None if limits.named_s() is None else 1e3 * limits.budget_s(1.0)


@pytest.mark.parametrize(
    ("pairs", "latency_ms"),
    [
        ([], None),
        ([(OWN, "250")], 250),
        ([(OWN, "2.5e2"), (TIMEOUT, "0.001")], 250),
        ([(TIMEOUT, "0.1")], 100),
        ([(TIMEOUT, "60")], 1000),
        ([(TIMEOUT, "0")], None),
        ([(PROXIED, "400"), (TIMEOUT, "2.4")], 400),
        ([("accept", "x"), ("authorization", "y")], None),
    ],
)
def test_time_that_a_client_gives(pairs, latency_ms):
    assert latency_ms_of(pairs) == latency_ms


@pytest.mark.parametrize("name", [OWN, TIMEOUT])
@pytest.mark.parametrize(
    "value",
    ["", "soon", "nan", "inf", "1e999", "1e12", "1_0", "0x10", "١٢", "1" * 40, "1,2", "5ms"],
)
def test_header_that_is_no_number(name, value):
    with pytest.raises(BadHeader) as refused:
        latency_ms_of([(name, value), (PROXIED, "400")])
    body = refused.value.to_body()
    assert (refused.value.http_status, body["field"]) == (400, name)
    assert f"header {name} must be a positive number" in body["message"]
    assert len(body["message"]) < 300


@pytest.mark.parametrize("value", ["0", "-1", "-inf", "1e-400"])
def test_no_time_at_all(value):
    with pytest.raises(BadHeader, match="positive"):
        latency_ms_of([(OWN, value)])


@pytest.mark.parametrize("value", ["-1", "86401", "-inf"])
def test_timeouts_out_of_range(value):
    with pytest.raises(BadHeader, match="positive number of seconds, at most 86400, got"):
        latency_ms_of([(TIMEOUT, value)])


def test_header_twice():
    with pytest.raises(BadHeader, match="is there 2 times; send one"):
        latency_ms_of([(OWN, "5"), (OWN, "5000")])


@given(st.lists(st.tuples(st.sampled_from([OWN, PROXIED, TIMEOUT]), st.text(max_size=12))))
@settings(max_examples=100)
def test_any_headers(pairs):
    try:
        latency_ms = latency_ms_of(pairs)
    except BadHeader as error:
        json.dumps(error.to_body()).encode()
    else:
        assert latency_ms is None or 0 < latency_ms <= 86_400_000


@pytest.mark.parametrize("value", ["soon", "nan", "-1", "1e12", "1_0", "", "1" * 40])
@pytest.mark.parametrize("name", [OWN, TIMEOUT])
def test_without_strict_a_bad_value_counts_as_absent(name, value):
    assert TimeLimits([(name, value)]).budget_s(0.5) == 0.5
    assert TimeLimits([(name, value)]).named_s() is None
    assert TimeLimits([(name, "1"), (name, "2")]).named_s() is None


def test_a_client_cannot_speak_for_a_proxy():
    said = [(name, "7") for name in HEADERS]
    assert [name for name, _ in without(said, "door", "failover", "mark")] == [
        OWN,
        CLASS,
        TIMEOUT,
    ]
    assert TimeLimits([(PROXIED, "7")], proxied=False).named_s() is None


@pytest.mark.parametrize("kind", [str, bytes])
def test_what_was_spent_is_less_for_those_behind(kind):
    def of(*pairs):
        return [tuple(x.encode() if kind is bytes else x for x in pair) for pair in pairs]

    asked = of((OWN, "800"), ("accept", "*/*"), (TIMEOUT, "2"))
    assert spent(asked, 0.0) == of((OWN, "800"), ("accept", "*/*"), (PROXIED, "2000.000"))
    assert spent(asked, 0.5) == of((OWN, "300.000"), ("accept", "*/*"), (PROXIED, "1500.000"))
    assert spent(asked, 9.0) == of((OWN, "1.000"), ("accept", "*/*"), (PROXIED, "1.000"))
    assert spent(asked, 0.5, 0.25)[-1] == of((PROXIED, "250.000"))[0]
    bad = of((OWN, "soon"), (TIMEOUT, "0"))
    assert spent(bad, 0.5) == bad


def test_the_class_that_a_client_names():
    for kind in (str, str.encode):
        pairs = [(kind("a"), kind("b")), (kind(CLASS), kind("gold"))]
        assert slo_class_of(pairs) == "gold"
    assert slo_class_of([]) == slo_class_of([(CLASS, "x" * 101)]) == ""


def test_the_module_is_light():
    """`ray-slo-haproxy` imports it, and must start at once."""
    code = "import sys, ray_slo.serve.proxy.haproxy; assert not {'ray', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_scope_lasts_a_day_at_most():
    with deadline_scope(1e15):
        assert remaining_ms() == pytest.approx(MAX_LATENCY_MS, rel=1e-3)
    with deadline_scope(None):
        assert remaining_ms() is None
