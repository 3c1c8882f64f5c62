"""/openapi.json from what routes declare and from the structs that bodies are checked with. OpenAPI 3.1."""

from __future__ import annotations

import ast
import http
import inspect
import itertools
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec
from aiohttp.typedefs import Handler
from msgspec import Struct, UnsetType

from frontend.answer_schema import Error

JSON = "application/json"
REF = "#/components/schemas/{name}"
UNKNOWN_TO_ALL = 500
"""The status that any operation may answer."""
RETRIED = (429, 503)
"""The statuses that may come with Retry-After."""
_PLACE = re.compile(r"\{(\w+)(:[^}]*)?\}")

Schema = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Route:
    """One operation. Any of them may answer 500 beside what `errors` lists."""

    method: str
    path: str
    """As aiohttp has it."""
    handler: Handler
    tag: str
    summary: str
    body: type[Struct] | None = None
    """Of the request, in JSON."""
    form: type[Struct] | None = None
    """The fields beside the file of an upload."""
    query: type[Struct] | None = None
    answer: type[Struct] | None = None
    """What is answered with 200, in JSON ..."""
    media: str = JSON
    """... or something of this type."""
    events: type[Struct] | None = None
    """What the events of a stream hold."""
    errors: Sequence[int] = ()
    unavailable: type[Struct] = Error
    """What is answered with 503."""
    example: dict[str, Any] = field(default_factory=dict)
    """A body."""

    @property
    def template(self) -> str:
        """The path as OpenAPI has it."""
        return _PLACE.sub(r"{\1}", self.path)


def document(routes: Sequence[Route], version: str) -> Schema:
    """The whole document."""
    paths: dict[str, Schema] = {}
    for each in routes:
        paths.setdefault(each.template, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Toka", "version": version},
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": _components(routes),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


# --- Operations


def _operation(route: Route) -> Schema:
    parameters = [
        {"name": found[1], "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for found in _PLACE.finditer(route.path)
    ]
    if route.query is not None:
        described = _described(route.query)
        parameters += [
            {"name": name, "in": "query", "required": name in described["required"], "schema": schema}
            for name, schema in described["properties"].items()
        ]
    operation: Schema = {
        "operationId": route.handler.__qualname__,
        "tags": [route.tag],
        "summary": route.summary,
        "responses": _responses(route),
    }
    if parameters:
        operation["parameters"] = parameters
    if content := _request(route):
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _request(route: Route) -> Schema:
    if route.body is not None:
        return {JSON: {"schema": _ref(route.body)} | ({"example": route.example} if route.example else {})}
    if route.form is None:
        return {}
    form = _described(route.form)
    file = {"type": "string", "format": "binary", "minLength": 1}
    whole = {"properties": {"file": file} | form["properties"], "required": ["file", *form["required"]]}
    return {"multipart/form-data": {"schema": form | whole}}


def _responses(route: Route) -> Schema:
    content: Schema = {route.media: {} if route.answer is None else {"schema": _ref(route.answer)}}
    if route.events is not None:
        content["text/event-stream"] = {"schema": _event(route.events)}
    responses = {"200": {"description": "OK", "content": content}}
    for status in sorted({*route.errors, UNKNOWN_TO_ALL}):
        kind = route.unavailable if status == 503 else Error
        response: Schema = {"description": http.HTTPStatus(status).phrase, "content": {JSON: {"schema": _ref(kind)}}}
        if status in RETRIED:
            seconds = {"type": "integer", "minimum": 1}
            response["headers"] = {"Retry-After": {"description": "In seconds.", "schema": seconds}}
        responses[str(status)] = response
    return responses


def _event(kind: type[Struct]) -> Schema:
    """One event of a stream: a chunk, an error in the midst of it, or its end."""
    chunk = {"contentMediaType": JSON, "contentSchema": {"anyOf": [_ref(kind), _ref(Error)]}}
    data = {"type": "string", "if": {"const": "[DONE]"}, "else": chunk}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


# --- Schemas


def _ref(kind: type[Struct]) -> Schema:
    return {"$ref": REF.format(name=kind.__name__)}


def _components(routes: Sequence[Route]) -> dict[str, Schema]:
    requests = {kind for each in routes for kind in (each.body,) if kind is not None}
    answers = {kind for each in routes for kind in (each.answer, each.events, each.unavailable) if kind is not None}
    _, components = msgspec.json.schema_components([*requests, *answers, Error], ref_template=REF)
    for kind in set[type[Struct]]().union(*map(_structs, (*requests, *answers, Error))):
        _describe(components[kind.__name__], kind)
    for kind in set[type[Struct]]().union(*map(_structs, (*answers, Error))):
        _complete(components[kind.__name__], kind)
    return dict(sorted(components.items()))


def _described(kind: type[Struct]) -> Schema:
    """The schema of a struct that holds no other, with what its fields mean."""
    schema: Schema = msgspec.json.schema_components([kind])[1][kind.__name__]
    _describe(schema, kind)
    return schema


def _describe(schema: Schema, kind: type[Struct]) -> None:
    """Say of each property what stands below its field; of one that takes only null, that it is not supported."""
    meanings = _meanings(kind)
    for each in msgspec.structs.fields(kind):
        own = schema["properties"][each.encode_name]
        if each.name in meanings:
            own["description"] = meanings[each.name]
        elif own.get("type") == "null" and "default" in own:
            own["description"] = "Not supported."
        if own.get("default", 0) is None:
            del own["default"]


def _complete(schema: Schema, kind: type[Struct]) -> None:
    """An answer has all its fields, but for those that are UNSET."""
    fields = msgspec.structs.fields(kind)
    schema["required"] = [each.encode_name for each in fields if UnsetType not in get_args(each.type)]


def _structs(kind: Any) -> set[type[Struct]]:
    """A struct and all those within it; those within any other type."""
    found: set[type[Struct]] = set()

    def look(each: Any) -> None:
        if isinstance(each, type) and issubclass(each, Struct) and each not in found:
            found.add(each)
            for hint in get_type_hints(each).values():
                look(hint)
        for inner in get_args(each):
            look(inner)

    look(kind)
    return found


@cache
def _meanings(kind: type[Struct]) -> dict[str, str]:
    """The docstrings that stand below a struct's fields, inherited ones included."""
    meanings: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if not issubclass(each, Struct) or each is Struct:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for field_, below in itertools.pairwise(definition.body):
            match field_, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    meanings[name] = inspect.cleandoc(text)
    return meanings
