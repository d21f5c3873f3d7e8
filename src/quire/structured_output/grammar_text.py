"""A request's constraint in the grammar engine's own language.

Knows JSON schemas, regular expressions, choices, EBNF and Lark grammars, and structural tags. Compiles nothing.
"""

import json
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark

from quire.config import limits
from quire.errors import RequestError, refusing
from quire.extras import install_command
from quire.guards import is_dict, is_sequence
from quire.json_schemas import close_objects
from quire.lark import ANY_TEXT, between_slashes, escaped
from quire.sampling_params import StructuredOutputsParams


def write_grammar(params: StructuredOutputsParams) -> str:
    """The constraint as a grammar; that it makes sense is found out when it is compiled.
    Raises RequestError: it cannot be written; `param` names the field."""
    kind, value = params.constraint()
    match kind:
        case "json":
            return _json_grammar(json.loads(value) if isinstance(value, str) else value, params)
        case "json_object":
            return _json_grammar({"type": "object"}, params)
        case "regex":
            return LLMatcher.grammar_from_lark(f"start: /{between_slashes(value)}/")
        case "choice":
            return LLMatcher.grammar_from_lark(f"start: /{'|'.join(map(escaped, value))}/")
        case "structural_tag":
            return _tag_grammar(value, params)
        case _:
            return LLMatcher.grammar_from_lark(_from_ebnf(value) if "::=" in value else value)


def _from_ebnf(text: str) -> str:
    # Whatever its parser stumbles over.
    with refusing(Exception, param="grammar", what="structured_outputs.grammar is not EBNF"):
        return gbnf_to_lark(text)


def _json_grammar(schema: Any, params: StructuredOutputsParams) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(_schema(schema, params)))


def _schema(schema: Any, params: StructuredOutputsParams) -> Any:
    """A schema with the request's options, which the engine reads from the schema itself."""
    if params.disable_additional_properties:
        schema = close_objects(schema)
    if not is_dict(schema):
        schema = {} if schema is True else {"not": {}}
    options: dict[str, Any] = {}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return {**schema, "x-guidance": options} if options else schema


def _tag_grammar(given: Any, params: StructuredOutputsParams) -> str:
    """Free text in which some openings oblige to a schema: `{"structures": [{"begin", "schema", "end"}], "triggers"}`."""
    given = json.loads(given) if isinstance(given, str) else given
    if "format" in given:
        raise RequestError(
            "structured_outputs.structural_tag with a `format` needs the other grammar engine "
            f"({install_command('xgrammar')}, and no "
            "--structured-outputs-config.backend guidance); or give `structures` and `triggers`",
            param="structural_tag",
        )
    if not given.get("structures") or not given.get("triggers"):
        message = "structured_outputs.structural_tag must be an object with lists `structures` and `triggers`"
        raise RequestError(message, param="structural_tag")
    structures, triggers = given["structures"], given["triggers"]
    if not is_sequence(structures) or not is_sequence(triggers) or len(structures) > limits.MAX_CHOICES:
        raise RequestError(
            f"structured_outputs.structural_tag: `structures` and `triggers` are lists of at most {limits.MAX_CHOICES}",
            param="structural_tag",
        )
    return StructTag.to_grammar(
        [_tag(structure, triggers, params) for structure in structures], assume_special=False, text_regex=ANY_TEXT
    )


def _tag(structure: Any, triggers: Any, params: StructuredOutputsParams) -> StructTag:
    begin, end = (structure.get("begin"), structure.get("end")) if is_dict(structure) else (None, None)
    if not isinstance(begin, str) or not isinstance(end, str):
        message = "structured_outputs.structural_tag: each of `structures` has texts `begin` and `end`, and a `schema`"
        raise RequestError(message, param="structural_tag")
    trigger = next((one for one in triggers if isinstance(one, str) and one and begin.startswith(one)), None)
    if trigger is None:
        message = f"structured_outputs.structural_tag: no trigger begins {begin!r} (triggers: {list(triggers)!r})"
        raise RequestError(message, param="structural_tag")
    schema = structure.get("schema", {})
    return StructTag(trigger=trigger, begin=begin, grammar=_schema(schema, params), end=end)
