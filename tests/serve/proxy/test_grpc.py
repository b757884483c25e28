"""Serve's gRPC proxy sends the calls of a dead frontend again, or answers with a reason."""

import asyncio

import grpc
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private import proxy as serve_proxy
from ray.serve._private.grpc_util import get_grpc_response_status, set_grpc_code_and_details

from ray_slo.core.environment import MARK
from ray_slo.serve import grpc as grpc_module
from ray_slo.serve.deadlines import HEADERS
from ray_slo.serve.grpc import PUSHBACK_METADATA, add_inference_to_server, reported
from ray_slo.serve.protos import DescribeRequest, InferReply, InferRequest
from ray_slo.serve.proxy import grpc as grpc_failover
from ray_slo.serve.proxy import modes
from ray_slo.serve.proxy.door import ProxyDoor
from ray_slo.serve.proxy.places import Place
from tests.serve import clock


class Context:
    """A call's, as gRPC has it."""

    def __init__(self, metadata=(), timeout_s=None):
        self.metadata, self.timeout_s = (("application", "a"), *metadata), timeout_s
        self.status, self.said, self.trailing = None, "", ()
        self.began = None

    def invocation_metadata(self):
        return self.metadata

    def time_remaining(self):
        loop = asyncio.get_running_loop()
        if self.began is None:
            self.began = loop.time()
        return None if self.timeout_s is None else self.timeout_s - (loop.time() - self.began)

    def code(self):
        return self.status

    def set_code(self, code):
        self.status = code

    def details(self):
        return self.said

    def set_details(self, details):
        self.said = details

    def trailing_metadata(self):
        return self.trailing

    def set_trailing_metadata(self, metadata):
        self.trailing = metadata


class Serve:
    """Its gRPC proxy: every call has the next of `answers`, after a while: an exception is how its
    replica failed, None is none at all."""

    def __init__(self, *answers, takes_s=0.1, trailing=(("request_id", "1"),)):
        self.answers, self.takes_s, self.trailing = list(answers), takes_s, trailing
        self.requests, self.metadata, self.handlers = [], [], {}
        add_inference_to_server(self, self)

    def service_handler_factory(self, service_method, streaming_type):
        async def handle(request, context):
            self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            answer = self.answers.pop(0)
            try:
                await asyncio.sleep(1e6 if answer is None else self.takes_s)
            except asyncio.CancelledError as error:
                answer = error
            if not isinstance(answer, BaseException):
                context.set_trailing_metadata(self.trailing)
                context.set_code(grpc.StatusCode.OK)
                return answer.SerializeToString()
            status = serve_proxy.get_grpc_response_status(answer, None, "1")
            set_grpc_code_and_details(context, status)
            return b""

        return handle

    def __getattr__(self, method):
        return self.service_handler_factory(service_method=method, streaming_type=None)

    def add_generic_rpc_handlers(self, handlers):
        (handler,) = handlers
        self.handlers = handler._method_handlers

    def call(self, request, context, method="Infer"):
        handler = self.handlers[f"/ray_slo.v1.Inference/{method}"]
        return clock.run(handler.unary_unary(request, context))


DIED = ActorDiedError()
REPLY = InferReply(json="4", latency_slo_ms=250)


@pytest.fixture(autouse=True)
def serves_own(monkeypatch):
    monkeypatch.setattr(grpc_module, "shared", ProxyDoor)
    monkeypatch.setattr(serve_proxy, "get_grpc_response_status", get_grpc_response_status)


def test_a_call_goes_to_another_frontend_with_less_time():
    serve = Serve(DIED, ActorUnavailableError("gone", None), REPLY)
    context = Context([("x-slo-latency-ms", "1000")])
    request = InferRequest(json="2", model="m", latency_slo_ms=800)
    assert InferReply.FromString(serve.call(request, context)).json == "4"
    assert (context.status, context.said) == (grpc.StatusCode.OK, "")
    assert context.trailing == [("request_id", "1")]
    assert [r.json for r in serve.requests] == ["2", "2", "2"]
    assert [r.latency_slo_ms for r in serve.requests] == pytest.approx([800, 700, 600])
    told = [float(m["x-slo-latency-ms"]) for m in serve.metadata]
    assert told == pytest.approx([1000, 900, 800])
    assert request.latency_slo_ms == 800


CAPACITY = ("x-slo-capacity", "10;400;2000;9000000;5000000")


def test_what_frontends_say_of_themselves_goes_no_further(monkeypatch):
    door = ProxyDoor()
    monkeypatch.setattr(grpc_module, "shared", lambda: door)
    serve = Serve(REPLY, trailing=[("request_id", "1"), CAPACITY])
    context = Context([("x-slo-refused-before", "9")])
    serve.call(InferRequest(json="2", model="m"), context)
    assert context.trailing == [("request_id", "1")]
    assert "x-slo-refused-before" not in serve.metadata[0]  # a client's own word
    assert door.slo_s(Place("", "m")) == 0.4
    assert door.gate.inside == 0


@pytest.mark.parametrize("mark", [None, "0123456789abcdef"])
def test_a_client_speaks_for_no_proxy_however_often_it_says_it(monkeypatch, mark):
    monkeypatch.setenv(modes.HAPROXY_ENV, "1")
    monkeypatch.setenv(modes.BINARY_ENV, f"/x/{modes.COMMAND}")
    monkeypatch.setenv(MARK.name, "0123456789abcdef")
    theirs = [name for name, header in HEADERS.items() if header.said_by != "client"]
    said = [(name, value) for name in theirs for value in ("77", "ab" * 16)]
    said = [pair for pair in said if pair[0] != "x-slo-mark"]
    serve = Serve(REPLY)
    serve.call(InferRequest(json="2"), Context([*said, *[("x-slo-mark", mark)] * bool(mark)]))
    (told,) = serve.metadata
    attempt = told.pop("x-slo-attempt")
    assert (attempt == "ab" * 16) is (mark == "0123456789abcdef")
    assert not told.keys() & set(theirs)


def test_an_answer_is_read_once(monkeypatch):
    read = []

    class Counted:
        @staticmethod
        def FromString(answer):  # noqa: N802
            read.append(answer)
            return InferReply.FromString(answer)

    monkeypatch.setattr(grpc_failover, "InferReply", Counted)
    serve = Serve(REPLY, trailing=[CAPACITY])
    answer = serve.call(InferRequest(json="2", model="m"), Context())
    assert read == [answer]


def test_more_than_workers_can_do_are_refused_before_they_cost_anything(monkeypatch):
    contexts = [Context([("x-slo-latency-ms", "5000")], timeout_s=20.0) for _ in range(200)]
    request = InferRequest(json="2", model="m")

    async def main():
        door = ProxyDoor()
        door.heard(Place("", "m"), CAPACITY[1], None, None)
        monkeypatch.setattr(grpc_module, "shared", lambda: door)
        serve = Serve(*[REPLY] * 64, trailing=[CAPACITY], takes_s=1.0)
        infer = serve.handlers["/ray_slo.v1.Inference/Infer"].unary_unary
        await asyncio.gather(*(infer(request, context) for context in contexts))
        await infer(request, Context())
        return serve, door

    serve, door = clock.run(main())
    refused = [c for c in contexts if c.status is grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert len(refused) == 200 - 50  # they can do 50 in 5 s
    assert {reported(c)["reason"] for c in refused} == {"queue_full"}
    assert sum(int(m.get("x-slo-refused-before", 0)) for m in serve.metadata) == len(refused)
    assert door.gate.inside == 0


@pytest.mark.parametrize("status, counts", [("RESOURCE_EXHAUSTED", 1), (None, 0), ("INTERNAL", 0)])
def test_the_door_counts_what_frontends_refuse(status, counts):
    async def main():
        door, place = ProxyDoor(), Place("", "m")
        door.heard(place, CAPACITY[1], None, None)

        async def handle(request, context):
            if status:
                context.set_code(getattr(grpc.StatusCode, status))
            return REPLY.SerializeToString()

        call = grpc_module.Failover(door)
        await call(handle, InferRequest(json="2", model="m"), Context())
        return door

    door = clock.run(main())
    assert sum(door.gate._excess.values()) == counts
    assert door.gate.inside == 0


def test_time_at_the_door_is_the_calls_own(monkeypatch):
    """Of the model's SLO, too, which the client does not name."""

    async def main():
        door = ProxyDoor()
        door.heard(Place("", "m"), "1000;400;2000;100;100", None, None)
        monkeypatch.setattr(grpc_module, "shared", lambda: door)
        serve = Serve(*[REPLY] * 80, takes_s=0.3)
        infer = serve.handlers["/ray_slo.v1.Inference/Infer"].unary_unary
        request = InferRequest(json="2", model="m")
        await asyncio.gather(*(infer(request, Context(timeout_s=9.0)) for _ in range(70)))
        return serve

    told = [float(m["x-slo-timeout-ms"]) for m in clock.run(main()).metadata]
    assert told[0] == pytest.approx(9000)  # which the SLO is shorter than
    assert told[64:] == pytest.approx([100.0] * (len(told) - 64))
    assert len(told) > 64


def test_the_first_calls_of_all_wait_for_each_other(monkeypatch):
    """Nobody has said yet what can be done, and they must not all go on at once."""

    async def main():
        serve = Serve(*[REPLY] * 300, trailing=[CAPACITY], takes_s=1.0)
        infer = serve.handlers["/ray_slo.v1.Inference/Infer"].unary_unary
        asked = [infer(InferRequest(json="2", model="m"), Context()) for _ in range(300)]
        going = asyncio.gather(*asked)
        await asyncio.sleep(0.5)
        before = len(serve.requests)
        await going
        return before

    assert clock.run(main()) == 16


def test_a_call_whose_time_passes_while_others_try_a_place_is_expired(monkeypatch):
    async def main():
        serve = Serve(*[REPLY] * 20, takes_s=1.0)
        infer = serve.handlers["/ray_slo.v1.Inference/Infer"].unary_unary
        request, late = InferRequest(json="2", model="m"), Context(timeout_s=0.5)
        first = asyncio.gather(*(infer(request, Context()) for _ in range(16)))
        await asyncio.sleep(0.1)
        await asyncio.gather(first, infer(request, late))
        return serve, late

    serve, late = clock.run(main())
    assert len(serve.requests) == 16  # no frontend has seen it, and none was lost with it
    assert late.status is grpc.StatusCode.DEADLINE_EXCEEDED
    assert reported(late)["reason"] == "expired"


def test_made_up_models_keep_no_known_one_out_and_none_is_kept(monkeypatch):
    contexts = [Context(timeout_s=20.0) for _ in range(3000)]

    async def main():
        door = ProxyDoor()
        door.heard(Place("", "m"), CAPACITY[1], None, None)
        monkeypatch.setattr(grpc_module, "shared", lambda: door)
        serve = Serve(*[REPLY] * 4000, trailing=[("x-slo-capacity", "none")], takes_s=0.01)
        infer = serve.handlers["/ray_slo.v1.Inference/Infer"].unary_unary
        attack = asyncio.gather(
            *(infer(InferRequest(json="2", model=f"x{i}"), c) for i, c in enumerate(contexts))
        )
        await asyncio.sleep(0.05)
        before = asyncio.get_running_loop().time()
        known = Context(timeout_s=0.4)
        await infer(InferRequest(json="2", model="m"), known)
        took_s = asyncio.get_running_loop().time() - before
        await attack
        return known, took_s, door

    known, took_s, door = clock.run(main())
    assert known.status is grpc.StatusCode.OK and took_s < 0.1
    statuses = {c.status for c in contexts}
    assert statuses == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert list(door._places) == [Place("", "m")]
    assert (door.gate.inside, door.gate.waiting) == (0, 0)


def test_a_message_that_is_too_large_goes_no_further(monkeypatch):
    door = ProxyDoor()
    door.heard(Place("", "m"), "10;400;2000;100;100", None, None)
    monkeypatch.setattr(grpc_module, "shared", lambda: door)
    serve = Serve(REPLY)
    context = Context()
    serve.call(InferRequest(json="2" * 5000, model="m"), context)
    assert context.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reported(context)["reason"] == "body_too_large"
    assert not serve.requests
    serve.call(InferRequest(json="2", model="m"), Context())
    assert len(serve.requests) == 1


def test_what_was_in_a_hook_when_its_frontend_ended_is_not_repeated(monkeypatch):
    serve = Serve(DIED, REPLY)
    monkeypatch.setattr(grpc_failover, "is_suspect", lambda attempt: len(attempt) == 32)
    context = Context([("x-slo-attempt", "mine")])
    assert serve.call(InferRequest(json="2"), context) == b""
    assert context.status is grpc.StatusCode.UNAVAILABLE
    assert "may be why" in reported(context)["message"]
    (told,) = serve.metadata
    assert len(told["x-slo-attempt"]) == 32


@pytest.mark.parametrize("slo_ms", [-1.0, 0.0])
def test_what_is_no_slo_is_the_applications_to_refuse(slo_ms):
    serve = Serve(DIED, REPLY)
    serve.call(InferRequest(json="2", latency_slo_ms=slo_ms), Context())
    assert [r.latency_slo_ms for r in serve.requests] == [slo_ms, slo_ms]


def test_the_calls_own_deadline_goes_on():
    serve = Serve(DIED, REPLY)
    context = Context([("x-slo-timeout-ms", "9")], timeout_s=1.0)
    serve.call(InferRequest(json="2"), context)
    told = [float(m["x-slo-timeout-ms"]) for m in serve.metadata]
    assert told == pytest.approx([1000, 900])
    assert not serve.requests[1].HasField("latency_slo_ms")


@pytest.mark.parametrize("answers", [[DIED] * 3, [DIED, REPLY]])
def test_a_frontend_that_is_lost_for_good_is_unavailable_with_a_reason(answers):
    serve = Serve(*answers)
    context = Context(timeout_s=0.05 if len(answers) == 2 else None)  # no time is left
    assert serve.call(InferRequest(json="2"), context) == b""
    assert context.status is grpc.StatusCode.UNAVAILABLE
    said = reported(context)
    assert (said["error"], said["reason"]) == ("FrontendLost", "frontend_lost")
    assert dict(context.trailing)[PUSHBACK_METADATA] == "1000"


@pytest.mark.parametrize("method", ["Infer", "Describe"])
def test_what_else_goes_wrong_is_serves_to_say(method):
    serve = Serve(ValueError("not ours"))
    context = Context()
    request = InferRequest(json="2") if method == "Infer" else DescribeRequest()
    assert serve.call(request, context, method) == b""
    assert (context.status, context.said) == (grpc.StatusCode.INTERNAL, "not ours")
    assert reported(context) == {}


def test_without_any_frontend_a_deadline_still_ends():
    serve = Serve(None)
    context = Context([("x-slo-latency-ms", "1000")])
    assert serve.call(InferRequest(json="2"), context) == b""
    assert context.status is grpc.StatusCode.DEADLINE_EXCEEDED
    said = reported(context)
    assert (said["reason"], said["message"]) == ("expired", "no frontend answered within 1.9 s")


def test_who_names_no_deadline_has_the_slo_of_the_model_which_may_have_changed():
    request = InferRequest(json="2", model="m")
    serve = Serve(REPLY, None, REPLY, None, trailing=[("x-slo-capacity", "9;250;100;1000;1000")])

    async def main():
        infer = serve.handlers["/ray_slo.v1.Inference/Infer"].unary_unary
        await infer(request, Context())
        for slo_ms in (250, 2000):
            assert await infer(request, context := Context()) == b""
            said = f"no frontend answered within {slo_ms / 1e3 + 0.9:.4g} s"
            assert reported(context)["message"] == said
            serve.trailing = [("x-slo-capacity", "9;2000;100;1000;1000")]
            await asyncio.sleep(1.0)  # meanwhile, it is asked again
        asked = serve.requests[2]
        assert (asked.model, asked.WhichOneof("item")) == ("m", None)

    clock.run(main())


def test_who_hangs_up_leaves_nothing_behind():
    serve = Serve(None)

    async def main():
        handler = serve.handlers["/ray_slo.v1.Inference/Infer"].unary_unary
        calling = asyncio.ensure_future(handler(InferRequest(latency_slo_ms=1e6), Context()))
        await asyncio.sleep(1.0)
        calling.cancel()
        await asyncio.sleep(1.0)
        return calling.cancelled(), len(asyncio.all_tasks())

    assert clock.run(main()) == (True, 1)


def test_where_serve_has_changed_it_says_what_it_says(monkeypatch):
    monkeypatch.delattr(serve_proxy, "get_grpc_response_status")
    add_inference_to_server(Serve(), Serve())


@pytest.mark.parametrize("method", ["Infer", "Describe"])
def test_bytes_that_are_no_message_are_refused_with_a_reason(method, caplog):
    serve, context = Serve(), Context()
    handler = serve.handlers[f"/ray_slo.v1.Inference/{method}"]
    request = handler.request_deserializer(b"\xff\xff\xff")
    assert serve.call(request, context, method) == b""
    assert context.status == grpc.StatusCode.INVALID_ARGUMENT
    assert reported(context)["reason"] == "bad_input"
    assert f"no ray_slo.v1.{method}Request" in reported(context)["message"]
    assert not serve.requests and not caplog.text
