"""gRPC: the service for Serve's gRPC proxy, its deadlines, and a stub for clients.

Start Serve with `grpc_options={"port": …, "grpc_servicer_functions": [SERVICER]}`; every ray-slo
application then answers `ray_slo.v1.Inference` (`protos/inference.proto`) in the same way as HTTP.

Serve passes a call's metadata to the application but not its deadline. `with_deadlines` writes the
remaining time into the metadata, where `deadlines` reads it. It also works for your own services.
`proxy.grpc` handles a frontend that dies.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from starlette.responses import Response

from ray_slo.serve.errors import BadInput, SLOError, error_body, http_status
from ray_slo.serve.frontend.answer import Answer, to_json
from ray_slo.serve.protos import (
    SERVICE,
    DescribeReply,
    DescribeRequest,
    InferReply,
    InferRequest,
    Stage,
)
from ray_slo.serve.proxy.door import shared
from ray_slo.serve.proxy.grpc import Failover, WithDeadline, notice_death
from ray_slo.serve.ray_private.addresses import Routes
from ray_slo.serve.ray_private.grpc_server import Handle, on_failure, through

SERVICER = "ray_slo.serve.grpc:add_inference_to_server"
ERROR_METADATA = "x-slo-error"
PUSHBACK_METADATA = "grpc-retry-pushback-ms"  # the equivalent of Retry-After in gRPC

# In bytes. Clients accept 8 KB of trailing metadata, and a byte may need six bytes there.
_MAX_MESSAGE = 600
_MAX_BODY = 4096
_OF_ANSWER = [  # fields of a reply that have the same name in an answer
    field.name
    for field in InferReply.DESCRIPTOR.fields
    if field.name != "stages" and hasattr(Answer, field.name)
]
# Codes of `HTTPException`s of the user's code. The rest are INVALID_ARGUMENT, or INTERNAL from 500.
_CODES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_METHODS = {"Infer": (InferRequest, InferReply), "Describe": (DescribeRequest, DescribeReply)}


def grpc_code(error: BaseException) -> str:
    """Return the name of the `grpc.StatusCode` for this error."""
    if isinstance(error, SLOError):
        return error.grpc_code
    status = http_status(error)
    return _CODES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")


class InferenceStub:
    """Client of `ray_slo.v1.Inference`, on a channel of `grpc` or `grpc.aio`.

    Example:
        >>> stub = InferenceStub(grpc.insecure_channel("127.0.0.1:9000"))  # doctest: +SKIP
        >>> stub.Infer(InferRequest(json="3"), timeout=0.2, metadata=[("application", "digits")])
    """

    def __init__(self, channel: Any) -> None:
        for name, (request, reply) in _METHODS.items():
            call = channel.unary_unary(
                f"/{SERVICE}/{name}",
                request_serializer=request.SerializeToString,
                response_deserializer=reply.FromString,
            )
            setattr(self, name, call)


def reported(error: Any) -> dict[str, Any]:
    """Return the reason of a failed call from its `grpc.RpcError`. It is the body that HTTP would
    answer with. It is empty if the application did not answer, for example if the client's deadline
    passed first.
    """
    said = dict(error.trailing_metadata() or ()).get(ERROR_METADATA)
    return {} if said is None else dict(json.loads(said))


# -- in Serve's proxy --------------------------------------------------------------------------


def with_deadlines(add_to_server: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return a servicer function whose calls pass their deadline to the application.

    Args:
        add_to_server: the function that protoc makes for a service, `add_…Servicer_to_server`.

    Returns:
        A function for `grpc_servicer_functions`; give it a name in a module.
    """

    async def call(handle: Handle, request: Any, context: Any) -> Any:
        return await handle(request, WithDeadline(context))

    return through(add_to_server, call, WithDeadline)


def _add_inference(servicer: Any, server: Any) -> None:
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            getattr(servicer, name),
            request_deserializer=partial(_read, request),
            response_serializer=reply.SerializeToString,
        )
        for name, (request, reply) in _METHODS.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _read(kind: Any, message: bytes) -> Any:
    """Return a client's message, or the error if its bytes are none. gRPC would log a traceback."""
    try:
        return kind.FromString(message)
    except DecodeError:
        return BadInput(f"the bytes are no {kind.DESCRIPTOR.full_name}", field="message")


def add_inference_to_server(servicer: Any, server: Any) -> None:
    """The servicer function of `ray_slo.v1.Inference` (`SERVICER`)."""
    again = Failover(shared(), Routes(getattr(server.service_handler_factory, "__self__", None)))

    async def call(handle: Handle, request: Any, context: Any) -> Any:
        try:
            if isinstance(request, BadInput):
                raise request
            return await again(handle, request, context)
        except SLOError as error:
            fail(context, error)
            return b""

    on_failure(notice_death)
    through(_add_inference, call, WithDeadline)(servicer, server)


# -- in the frontend ---------------------------------------------------------------------------


def reply_of(answer: Answer, text: bytes | None = None) -> Any:
    """Return the `InferReply` of an answer.

    Args:
        text: the result as JSON, if that was made already.

    Raises:
        TypeError: the result is not bytes, JSON, or an HTTP response held in memory.
    """
    result = answer.result
    content: dict[str, Any]
    if isinstance(result, bytes):
        content = {"data": result, "content_type": "application/octet-stream"}
    elif isinstance(result, Response):
        if not hasattr(result, "body") or result.status_code != 200:
            raise TypeError(
                f"a {type(result).__name__} of status {result.status_code} is not for gRPC; "
                "return bytes, JSON, or a Response of status 200 in postprocess"
            )
        content = {"data": bytes(result.body), "content_type": result.media_type or ""}
    else:
        content = {"json": (to_json(result) if text is None else text).decode()}
    stages = [Stage(**asdict(stage)) for stage in answer.stages]
    about = {name: getattr(answer, name) for name in _OF_ANSWER}
    return InferReply(**content, **about, stages=stages)


def fail(context: Any, error: Exception, details: bool = True) -> None:
    """Set the status of a call that failed; its reply is empty.

    Serve expects an exception, but that would drop the trailing metadata.

    Args:
        details: whether to show the message of an error of the user's own code.
    """
    body = error_body(error, details)
    message = body["message"].encode()[:_MAX_MESSAGE].decode(errors="ignore")
    body["message"] = message
    said = json.dumps(body)
    if len(said) > _MAX_BODY:
        said = json.dumps({k: body[k] for k in ("error", "reason", "message")})
    metadata = [(ERROR_METADATA, said)]
    if isinstance(error, SLOError) and error.retry_after_s is not None:
        metadata.append((PUSHBACK_METADATA, str(max(1, round(error.retry_after_s * 1e3)))))
    context.set_code(grpc.StatusCode[grpc_code(error)])
    context.set_details(message)
    context.set_trailing_metadata(metadata)
