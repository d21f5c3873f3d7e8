"""JSON schemas as a request's options change them, whatever engine reads them."""

from typing import Any

from quire.guards import is_dict, is_sequence


def close_objects(schema: Any) -> Any:
    """A schema whose objects have only the properties that it names."""
    if is_sequence(schema):
        return [close_objects(part) for part in schema]
    if not is_dict(schema):
        return schema
    closed = {key: close_objects(value) for key, value in schema.items()}
    if "properties" in closed and "additionalProperties" not in closed and "patternProperties" not in closed:
        closed["additionalProperties"] = False
    return closed
