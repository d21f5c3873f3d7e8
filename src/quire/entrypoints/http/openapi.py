"""The OpenAPI document, written from the tables of routes: the msgspec structs that the server really reads and answers with."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.entrypoints.http.errors import ErrorResponse, openapi_error_responses
from quire.entrypoints.http.route_tools import Endpoint
from quire.version import __version__

_FORM_FIELDS = {"binary": {"type": "string", "format": "binary"}}


def build_openapi(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The document of the routes that have a line about them."""
    told = [endpoint for endpoint in endpoints if endpoint.about]
    kinds: list[Any] = [ErrorResponse]
    kinds += [kind for each in told for kind in (*each.body, each.answer, each.error) if kind is not None]
    kinds = list(dict.fromkeys(kinds))
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    reference = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in told:
        path = endpoint.path.replace(":path", "")
        operation = _operation(path, endpoint, reference)
        paths.setdefault(path, {}).update({method.lower(): operation for method in endpoint.methods})
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _operation(path: str, endpoint: Endpoint, reference: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.answer or endpoint.body:
        content["application/json"] = {"schema": reference.get(endpoint.answer, {"type": "object"})}
    if any("stream" in body.__struct_fields__ for body in endpoint.body):
        content[endpoint.stream_type] = {}  # OpenAPI 3.1 cannot describe an event
    ok = {"description": "The answer." if endpoint.body else "OK", **({"content": content} if content else {})}
    errors = openapi_error_responses(reference[endpoint.error])
    operation: dict[str, Any] = {"summary": endpoint.about, "responses": {"200": ok, **errors}}
    if bodies := [reference[body] for body in endpoint.body]:
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        body = {"application/json": {"schema": schema, "example": endpoint.example}}
        operation["requestBody"] = {"required": True, "content": body}
    if endpoint.form:
        kinds = {name: kind.removesuffix("?") for name, kind in endpoint.form.items()}
        fields = {name: _FORM_FIELDS.get(kind, {"type": kind}) for name, kind in kinds.items()}
        required = [name for name, kind in endpoint.form.items() if not kind.endswith("?")]
        form = {"schema": {"type": "object", "properties": fields, "required": required}}
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": form}}
    named = [(name, "path", "string") for name in re.findall(r"{(\w+)}", path)]
    named += [(name, "query", kind) for name, kind in endpoint.query.items()]
    if named:
        operation["parameters"] = [_parameter(*each) for each in named]
    return operation


def _parameter(name: str, place: str, kind: str) -> dict[str, Any]:
    required = {"required": True} if place == "path" else {}
    return {"name": name, "in": place, **required, "schema": {"type": kind}}
