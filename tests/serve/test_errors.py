"""Errors keep their type, attributes and answer through pickling and Ray's wrapping."""

import asyncio
import json
import math
import pickle
import threading
from types import MappingProxyType

import fastapi
import pytest
from ray import cloudpickle
from ray.exceptions import RayTaskError
from ray.serve._private.grpc_util import get_grpc_response_status
from ray.serve._private.http_util import get_http_response_status
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.exceptions import HTTPException

from ray_slo import errors
from ray_slo.core.decisions import DropReason
from ray_slo.serve.errors import (
    error_body,
    error_of,
    errors_of_requests,
    http_response,
    outcome_of,
    predicted,
)
from ray_slo.serve.grpc import grpc_code
from ray_slo.serve.user_code import sendable
from tests.serve.openapi import ErrorBody, document

CONTEXT = {"model": "digits", "latency_slo_ms": 40.0, "predicted_finish_ms": 1540.0}
ERRORS = [
    errors.RefusedEarly("too late", reason="shed", **CONTEXT),
    errors.Expired("gone", **CONTEXT),
    errors.WorkerLost("died", retry_after_s=3, **CONTEXT),
    errors.BadInput("not an image", field="image", model="digits"),
    errors.BadHeader("no number", field="x-slo-latency-ms"),
    errors.BodyTooLarge("9 bytes; at most 8", field="body"),
    errors.UnsupportedEncoding("'br' is not taken", field="content-encoding"),
    errors.SlowBody("came too late", field="body"),
    errors.UnknownModel(model="digit", valid=["mnist", "digits"]),
    errors.OutOfMemory("too large alone", model="digits"),
    errors.BatchResultError("2 results for 3 requests", model="digits"),
    errors.ConfigError("policy 'x' is unknown"),
]
STATUS = {
    "RefusedEarly": (503, "RESOURCE_EXHAUSTED"),
    "Expired": (504, "DEADLINE_EXCEEDED"),
    "WorkerLost": (503, "UNAVAILABLE"),
    "BadInput": (422, "INVALID_ARGUMENT"),
    "BadHeader": (400, "INVALID_ARGUMENT"),
    "BodyTooLarge": (413, "RESOURCE_EXHAUSTED"),
    "UnsupportedEncoding": (415, "INVALID_ARGUMENT"),
    "SlowBody": (408, "DEADLINE_EXCEEDED"),
    "UnknownModel": (404, "NOT_FOUND"),
    "OutOfMemory": (500, "RESOURCE_EXHAUSTED"),
    "BatchResultError": (500, "INTERNAL"),
    "ConfigError": (500, "INTERNAL"),
}


def through_ray(error):
    wrapped = RayTaskError("f", "Traceback", error, proctitle="x", pid=1, ip="127.0.0.1")
    return wrapped.as_instanceof_cause()


WAYS = {
    "pickle": lambda e: pickle.loads(pickle.dumps(e)),
    "cloudpickle": lambda e: cloudpickle.loads(cloudpickle.dumps(e)),
    "ray": through_ray,
    "ray, twice": lambda e: cloudpickle.loads(cloudpickle.dumps(through_ray(e))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_survives(error, way):
    copy = WAYS[way](error)
    assert isinstance(copy, type(error))
    assert isinstance(copy, RayServeException)
    assert copy.to_body() == error.to_body()
    assert copy.reason == error.reason
    assert copy.retry_after_s == error.retry_after_s
    assert (copy.http_status, copy.grpc_code) == STATUS[type(error).__name__]
    assert json.loads(copy.message) == error.to_body()
    assert copy.to_body()["error"] == type(error).__name__


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_message_is_a_sentence_and_the_answer_is_json(error):
    assert str(error) == error.text != ""
    answer = http_response(error)
    assert answer.status_code == error.http_status
    assert json.loads(answer.body) == error.to_body()
    assert ("retry-after" in answer.headers) == (error.retry_after_s is not None)


@pytest.mark.parametrize("way", ["pickle", "ray"])
def test_serve_answers_refusals_with_their_own_status(way):
    refused = WAYS[way](ERRORS[0])
    http = get_http_response_status(refused, None, "id")
    assert http.code == 503
    if hasattr(http, "headers"):  # from Ray 2.58 on; `ray_private.versions` says it of the others
        assert http.headers == [(b"retry-after", b"2")]
    assert json.loads(http.message)["reason"] == "shed"
    assert get_grpc_response_status(refused, None, "id").code.name == "RESOURCE_EXHAUSTED"
    expired = WAYS[way](ERRORS[1])
    assert get_grpc_response_status(expired, None, "id").code.name == "DEADLINE_EXCEEDED"


def test_only_what_may_be_tried_again_is_back_pressure():
    assert {type(e).__name__ for e in ERRORS if isinstance(e, BackPressureError)} == {
        "RefusedEarly",
        "Expired",
        "WorkerLost",
    }
    assert isinstance(ERRORS[1], TimeoutError)
    for bad in (ERRORS[3], ERRORS[6]):
        assert isinstance(bad, ValueError)


def test_retry_after_is_the_predicted_lateness():
    assert errors.RefusedEarly("x", **CONTEXT).retry_after_s == 1.5
    assert errors.RefusedEarly("x", retry_after_s=0.2, **CONTEXT).retry_after_s == 0.2
    assert errors.RefusedEarly("x").retry_after_s == 1.0
    early = errors.RefusedEarly("x", latency_slo_ms=40, predicted_finish_ms=10)
    assert early.retry_after_s > 0  # never "ask again at once"
    assert http_response(early).headers["retry-after"] == "1"
    assert errors.RefusedEarly("x", retry_after_s=0).to_body()["retry_after_s"] > 0


def test_unknowns_are_left_out_of_the_body():
    error = errors.RefusedEarly("x", predicted_finish_ms=math.nan)
    assert set(error.to_body()) == {"error", "reason", "message", "retry_after_s"}


def test_unknown_model_lists_the_valid_names():
    error = errors.UnknownModel(model="digit", valid=["mnist", "digits"])
    assert "digits, mnist" in str(error)
    assert error.to_body()["valid"] == ["digits", "mnist"]


def test_every_error_has_the_short_path():
    every = {cls.__name__ for cls in errors_of_requests()} | {"SLOError"}
    assert every <= set(errors.__all__)
    assert all(issubclass(getattr(errors, name), errors.SLOError) for name in errors.__all__)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_bodies_are_as_the_openapi_document_says(error):
    assert ErrorBody.model_validate(error.to_body()).model_dump(exclude_none=True) == (
        error.to_body()
    )
    schema = document(["a"])["components"]["schemas"]["Error"]
    assert schema["required"] == ["error", "reason", "message"]
    assert schema["properties"]["valid"]["type"] == "array"


def test_how_a_request_ended():
    ended = {type(e).__name__: outcome_of(through_ray(e)) for e in ERRORS}
    assert ended["RefusedEarly"] == ("refused", "shed")
    assert ended["WorkerLost"] == ("refused", "worker_lost")
    assert ended["Expired"] == ("expired", "expired")
    assert ended["BadHeader"] == ("invalid", "bad_header")
    assert ended["UnknownModel"] == ("invalid", "unknown_model")
    assert ended["BatchResultError"] == ended["ConfigError"] == ("failed", "user_error")
    assert outcome_of(asyncio.CancelledError()) == ("cancelled", "cancelled")
    assert outcome_of(ValueError()) == ("failed", "user_error")


def test_what_a_policy_gives_up_has_an_error_and_words():
    assert [error_of(reason).__name__ for reason in DropReason] == [
        *("RefusedEarly", "RefusedEarly", "Expired", "RefusedEarly")
    ]
    assert all(reason.why and DropReason(reason.value) is reason for reason in DropReason)
    assert pickle.loads(pickle.dumps(DropReason.SHED)) is DropReason.SHED


class Own(Exception):
    """A user's error with attributes that look like ours, or like Ray's."""

    def __init__(self, message, *, code):
        super().__init__(message)
        self.cause, self.code = None, code


@pytest.mark.parametrize("cause", [None, "a text", ValueError("inner")])
def test_an_attribute_named_cause_is_the_users(cause):
    error = Own("the reason", code=3)
    error.cause = cause
    assert error_body(error) == {"error": "Own", "reason": "failed", "message": "the reason"}


def test_only_rays_wrapper_is_taken_off():
    wrapped = through_ray(ValueError("the reason"))
    again = RayTaskError("g", "Traceback", wrapped, proctitle="x", pid=1, ip="127.0.0.1")
    for error in (wrapped, again, again.as_instanceof_cause()):
        said = {"error": "ValueError", "reason": "failed", "message": "the reason"}
        assert error_body(error) == said


def test_no_stack_trace_is_shown():
    trace = (
        'Traceback (most recent call last):\n  File "/home/me/app.py", line 3, in f\nKeyError: 1'
    )
    for text in (trace, f"RayTaskError(KeyError): \x1b[36mray::f()\x1b[39m\n{trace}\n"):
        assert error_body(RuntimeError(text))["message"] == "KeyError: 1"


def test_the_text_of_an_error_over_a_handle_is_the_message_alone():
    for error in ERRORS:
        assert str(through_ray(error)) == str(error)


HTTP = [
    (401, "UNAUTHENTICATED", "invalid"),
    (403, "PERMISSION_DENIED", "invalid"),
    (404, "NOT_FOUND", "invalid"),
    (418, "INVALID_ARGUMENT", "invalid"),
    (429, "RESOURCE_EXHAUSTED", "invalid"),
    (500, "INTERNAL", "failed"),
    (503, "UNAVAILABLE", "failed"),
]


@pytest.mark.parametrize("kind", [HTTPException, fastapi.HTTPException])
@pytest.mark.parametrize("way", ["as it is", "ray"])
@pytest.mark.parametrize(("status", "code", "outcome"), HTTP)
def test_an_http_exception_has_its_own_status(kind, way, status, code, outcome):
    error = sendable(kind(status_code=status, detail="no", headers={"X-Own": "1"}))
    error = through_ray(error) if way == "ray" else error
    assert grpc_code(error) == code
    assert outcome_of(error) == (outcome, f"http_{status}")
    for details in (True, False):
        answer = http_response(error, details=details)
        assert (answer.status_code, answer.headers["x-own"]) == (status, "1")
        body = json.loads(answer.body)
        about = {"error": "HTTPException", "reason": f"http_{status}"}
        assert body == {**about, "message": "no", "detail": "no"}
        ErrorBody.model_validate(body)


class NotHere(HTTPException):
    def __init__(self):
        super().__init__(410)


@pytest.mark.parametrize(
    "error",
    [
        fastapi.HTTPException(status_code=401, detail={"why": [1]}, headers={"WWW-A": "B"}),
        HTTPException(402, threading.Lock()),
        HTTPException(403, headers=MappingProxyType({"a": "b"})),
        NotHere(),
    ],
)
def test_an_http_exception_reaches_another_process(error):
    copy = cloudpickle.loads(cloudpickle.dumps(sendable(error)))
    assert isinstance(copy, HTTPException)
    sent, own = http_response(copy), http_response(error)
    assert sent.status_code == own.status_code
    for answer in (sent, own):
        del answer.headers["content-length"]  # a text may contain an address
    assert dict(sent.headers) == dict(own.headers)


def test_an_http_exception_cannot_break_the_answer():
    headers = {
        **{"a b": "1", "x-evil": "1\r\nx-more: 2", "Content-Length": "3", "transfer-encoding": "c"},
        **{"x-number": 5, "x-wide": "\N{SNOWMAN}", "x:y": "1"},
    }
    answer = http_response(HTTPException(400, {1, 2}, headers))
    assert dict(answer.headers) == {
        **{"x-number": "5", "x-wide": "?", "content-type": "application/json"},
        "content-length": str(len(answer.body)),
    }
    assert json.loads(answer.body)["detail"] == "{1, 2}"
    for wrong in (0, 99, 600, "401", None):
        assert http_response(HTTPException(wrong, "no")).status_code == 500
    assert http_response(HTTPException(204)).body == b""


def test_the_margin_is_in_the_text_and_in_the_time_to_wait():
    said, again_s = predicted(476.4, 500, 25, late_s=0.0)
    assert (
        said == "SLO 500 ms, predicted finish 476 ms after arrival, and 25 ms are kept as a margin"
    )
    assert again_s == pytest.approx(0.0014)
    assert predicted(476.4, 500, 25, late_s=2.0)[1] == pytest.approx(2.0014)
    assert predicted(math.nan, 500, 25, late_s=2.0) == ("SLO 500 ms", None)
    assert predicted(100, 500, 25, late_s=0.0)[0].endswith("and the policy keeps a margin")
