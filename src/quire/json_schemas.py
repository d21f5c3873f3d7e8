"""JSON schemas whose objects have no other properties than those that they name. Knows no grammar and no engine."""

from typing import Any

from quire.guards import is_dict, is_sequence

DEFINITIONS = ("$defs", "definitions")
_NAMED = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)
_ONE = ("items", "additionalProperties", "contains", "propertyNames", "if", "then", "else", "not")
_SEVERAL = ("anyOf", "oneOf", "prefixItems")
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)


def close_objects(schema: Any) -> Any:
    """A schema without annotations, whose objects have only the properties that they name; except within `allOf`, whose parts
    add up."""
    if not is_dict(schema):
        return schema
    found = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    for key in _NAMED:
        if is_dict(found.get(key)):
            found[key] = {name: close_objects(part) for name, part in found[key].items()}
    for key in (*_ONE, *_SEVERAL):
        part = found.get(key)
        if is_sequence(part):
            found[key] = [close_objects(each) for each in part]
        elif part:
            found[key] = close_objects(part)
    if "properties" in found and not {"additionalProperties", "patternProperties", "allOf"} & found.keys():
        found["additionalProperties"] = False
    return found
