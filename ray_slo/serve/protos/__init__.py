"""Messages of `inference.proto`, made from its descriptor.

protoc's Python output does not run with a protobuf older than its protoc, and every application
brings its own protobuf. The descriptor has no such limit. After a change of the `.proto`::

    python -m grpc_tools.protoc -I . --descriptor_set_out=ray_slo/serve/protos/inference.binpb \
        ray_slo/serve/protos/inference.proto
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "ray_slo.v1.Inference"


def _messages() -> dict[str, Any]:
    stored = Path(__file__).with_name("inference.binpb").read_bytes()
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(stored).file
    pool = descriptor_pool.Default()
    pool.Add(file)
    found = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(about) for name, about in found.items()}


_made = _messages()
for _class in _made.values():
    _class.__module__ = __name__  # Serve's proxy pickles them

InferRequest: Any = _made["InferRequest"]
InferReply: Any = _made["InferReply"]
Stage: Any = _made["Stage"]
DescribeRequest: Any = _made["DescribeRequest"]
DescribeReply: Any = _made["DescribeReply"]
