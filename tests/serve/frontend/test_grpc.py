"""gRPC without Ray: the descriptor, deadlines of calls, statuses and replies."""

import asyncio
import json
import socket
from pathlib import Path

import grpc
import numpy as np
import pytest
from ray.serve._private import default_impl
from ray.serve._private.grpc_util import start_grpc_server
from ray.serve.config import gRPCOptions
from starlette.responses import PlainTextResponse, StreamingResponse

from ray_slo.core.environment import GRPC_HOST
from ray_slo.serve import protos
from ray_slo.serve.errors import (
    BadInput,
    BatchResultError,
    Expired,
    RefusedEarly,
    UnknownModel,
    WorkerLost,
)
from ray_slo.serve.frontend.answer import Answer, Stage
from ray_slo.serve.grpc import (
    PUSHBACK_METADATA,
    SERVICER,
    InferenceStub,
    fail,
    reply_of,
    reported,
)
from ray_slo.serve.protos import InferReply, InferRequest
from ray_slo.serve.ray_private import grpc_server

ANSWER = Answer(
    result={"a": np.float32(0.5)},
    model="m",
    variant="v",
    accuracy=None,
    batch_size=3,
    queue_ms=1.5,
    exec_ms=2.5,
    latency_ms=5.0,
    latency_slo_ms=4.0,
)


class Context:
    """What `fail` sets, and what a client's error then says."""

    def set_code(self, code):
        self.code = code.name

    def set_details(self, details):
        self.details = details

    def set_trailing_metadata(self, metadata):
        self.metadata = metadata

    def trailing_metadata(self):
        return self.metadata


def failed(error):
    context = Context()
    fail(context, error)
    return context


def test_descriptor_is_of_the_proto(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc")
    root, made = Path(__file__).parents[3], tmp_path / "made"
    source = "ray_slo/serve/protos/inference.proto"
    assert protoc.main(["", f"-I{root}", f"--descriptor_set_out={made}", str(root / source)]) == 0
    assert made.read_bytes() == (root / source).with_suffix(".binpb").read_bytes()
    assert protos.InferRequest.DESCRIPTOR.file.name == source


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RefusedEarly("late", latency_slo_ms=10, predicted_finish_ms=35), "RESOURCE_EXHAUSTED"),
        (Expired("over"), "DEADLINE_EXCEEDED"),
        (WorkerLost(worker="w"), "UNAVAILABLE"),
        (BadInput("bad", field="item"), "INVALID_ARGUMENT"),
        (UnknownModel(model="x", valid=["a"]), "NOT_FOUND"),
        (BatchResultError("short"), "INTERNAL"),
    ],
)
def test_status_of_an_error(error, code):
    context = failed(error)
    assert (context.code, context.details) == (code, str(error))
    assert reported(context) == error.to_body()
    pushback = dict(context.metadata).get(PUSHBACK_METADATA)
    assert pushback == ({"late": "25"}.get(str(error), "1000") if error.retry_after_s else None)


def test_users_error_is_internal_and_named():
    context = failed(KeyError("poison"))
    assert context.code == "INTERNAL"
    assert reported(context) == {"error": "KeyError", "reason": "failed", "message": "'poison'"}


@pytest.mark.parametrize("letter", ["a", "é", "\N{BOMB}", "\n"])
def test_metadata_stays_small(letter):
    context = failed(UnknownModel(model=9000 * letter, valid=["a"]))
    said = dict(context.metadata)["x-slo-error"]
    assert len(said) <= 4096
    assert said.isascii()
    assert len(context.details.encode()) <= 600
    assert reported(context)["reason"] == "unknown_model"


def test_reply_of_json_bytes_and_response():
    reply = reply_of(ANSWER)
    assert json.loads(reply.json) == {"a": 0.5}
    assert (reply.variant, reply.batch_size, reply.queue_ms) == ("v", 3, 1.5)
    assert not reply.HasField("accuracy")
    assert not reply.deadline_met

    def made(result, **changed):
        about = {name: getattr(ANSWER, name) for name in Answer.__slots__}
        return reply_of(Answer(**{**about, "result": result, **changed}))

    stage = Stage("t", requests=2, variants={"v": 2}, batch_size=1, queue_ms=1.0, exec_ms=2.0)
    reply = made(b"\x00", accuracy=90.0, stages=(stage,))
    assert (reply.data, reply.content_type) == (b"\x00", "application/octet-stream")
    assert (reply.accuracy, dict(reply.stages[0].variants)) == (90.0, {"v": 2})
    reply = made(PlainTextResponse("hi"))
    assert (reply.data, reply.content_type) == (b"hi", "text/plain")
    for not_for_grpc in (StreamingResponse([]), PlainTextResponse("no", 404)):
        with pytest.raises(TypeError, match="not for gRPC"):
            made(not_for_grpc)


def test_deadline_reaches_the_application_on_one_host(monkeypatch):
    """Serve's own server, with a handler in the application's place."""
    monkeypatch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)
    monkeypatch.delenv(GRPC_HOST.name, raising=False)
    for host in ("10.9.8.7", GRPC_HOST.read()):  # the last one holds
        grpc_server.bind_to(host)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    listens_on = []
    monkeypatch.setattr(
        "ray.serve._private.grpc_util.gRPCGenericServer.add_insecure_port",
        lambda self, address: (
            listens_on.append(address) or grpc.aio._server.Server.add_insecure_port(self, address)
        ),
    )

    def make(service_method, streaming_type):
        async def handle(request, context):
            assert context.peer().startswith("ipv4:127.0.0.1")  # all else is the call's own
            seen = [value for key, value in context.invocation_metadata() if "slo-timeout" in key]
            return InferReply(json=json.dumps(seen), model=request.model).SerializeToString()

        return handle

    async def main():
        options = gRPCOptions(port=port, grpc_servicer_functions=[SERVICER])
        loop = asyncio.get_running_loop()
        started = await start_grpc_server(make, options, event_loop=loop)
        # Ray 2.56 gives the task alone, which stops its server when it is cancelled.
        task, server = started if isinstance(started, tuple) else (started, None)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub, own = InferenceStub(channel), [("x-slo-timeout-ms", "1e9")]
                timed = await stub.Infer(InferRequest(model="a"), timeout=20, metadata=own)
                free = await stub.Infer(InferRequest(model="b"), metadata=own)
        finally:
            if server is None:
                task.cancel()
            else:
                await server.stop(0)
            await asyncio.wait([task])
        return timed, free

    timed, free = asyncio.run(main())
    assert listens_on == [f"127.0.0.1:{port}"]
    assert (timed.model, free.model) == ("a", "b")
    (left_ms,) = json.loads(timed.json)
    assert 0 < float(left_ms) < 21_000  # gRPC rounds a timeout up
    assert json.loads(free.json) == []  # none, and a client's own word for it is not believed
