"""The HTTP API of an application as an OpenAPI 3.1 document, made from the types of the answers.

It is not served: tests send requests that are made from it, and compare answers with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from ray_slo.core.text import SHOWN
from ray_slo.serve.deadlines import HEADERS
from ray_slo.serve.errors import errors_of_requests

_None = SkipJsonSchema[None]  # None is not in the schema: such a field is left out


def _without_defaults(schema: dict[str, Any]) -> None:
    for field in schema["properties"].values():
        field.pop("default", None)


class ErrorBody(BaseModel):
    """The body of every error answer, with the fields that `SLOError.to_body` may have."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_without_defaults)

    error: str = Field(description="The error's type.")
    reason: str = Field(description="Short and stable, for programs.")
    message: str = Field(description="One sentence for a person.")
    field: str | _None = Field(None, description="The part of the request that is wrong.")
    model: str | _None = Field(None, description=f"Cut after {SHOWN} characters if it is unknown.")
    task: str | _None = None
    valid: list[str] | _None = None
    latency_slo_ms: float | _None = None
    predicted_finish_ms: float | _None = None
    retry_after_s: float | _None = None
    detail: Any = Field(None, description="What the application gave to its HTTPException.")


def document(models: Iterable[str], title: str = "ray-slo") -> dict[str, Any]:
    """Requests and answers of an application.

    Args:
        models: names of models and pipelines.
        title: title of the document.
    """
    refusals = {
        str(status): _refusal(" / ".join(said)) for status, said in sorted(_by_status().items())
    }
    answers = {"200": {"description": "The model's result.", "content": _any_content()}, **refusals}
    path = {
        "parameters": [
            {
                "name": "model",
                "in": "path",
                "required": True,
                "description": "May be left out, with its slash, where there is one model.",
                "schema": {"enum": sorted(models)},
            }
        ],
        "get": {
            "operationId": "describe",
            "summary": "What is served: models, SLOs, variants.",
            "responses": {
                "200": {
                    "description": "The description.",
                    "content": {"application/json": {"schema": {"type": "object"}}},
                },
                **{status: refusals[status] for status in ("400", "404", "431")},
            },
        },
        "post": {
            "operationId": "infer",
            "summary": "Answer one item.",
            "parameters": _headers(),
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {}}, **_bytes_content()},
            },
            "responses": answers,
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": {"/{model}": path},
        "components": {"schemas": {"Error": ErrorBody.model_json_schema()}},
    }


def _by_status() -> dict[int, list[str]]:
    said: dict[int, list[str]] = {431: ["BadHeader: the headers together are too large."]}
    for cls in errors_of_requests():
        what = (cls.__doc__ or "").partition(" HTTP ")[0].partition("\n\n")[0]
        said.setdefault(cls.http_status, []).append(f"{cls.__name__}: {' '.join(what.split())}")
    said[405] = ["MethodNotAllowed: neither GET, HEAD nor POST."]
    said[500] = ["What the user's own code raised, or BatchResultError."]
    return said


def _refusal(description: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _headers() -> list[dict[str, Any]]:
    return [
        {
            "name": header.name,
            "in": "header",
            "description": header.means,
            "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": header.most}
            if header.per_s
            else {"type": "string"},
        }
        for header in HEADERS.values()
        if header.said_by == "client"
    ]


def _bytes_content() -> dict[str, Any]:
    return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def _any_content() -> dict[str, Any]:
    return {"application/json": {"schema": {}}, **_bytes_content()}
