"""Constraints: each kind, what vLLM refuses, and what is made to hurt."""

from __future__ import annotations

import json
from typing import Any

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
TAG = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "json_schema", "json_schema": {"type": "object"}},
    "end": "</f>",
}
OLD_TAG = {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]}

GOOD: dict[str, tuple[str, Any]] = {
    "json_schema": ("json_schema", SCHEMA),
    "any json": ("json_schema", "{}"),
    "json_object": ("json_object", True),
    "regex": ("regex", r"\d{3}-\d{4}"),
    "empty regex": ("regex", ""),
    "ebnf": ("grammar", 'root ::= "yes" | "no" root'),
    "lark": ("grammar", 'start: "yes" | "no" start'),
    "choice": ("choice", ["red", 'gr"e\n\\en', "blåbær", ""]),
    "structural_tag": ("structural_tag", json.dumps({"type": "structural_tag", "format": TAG})),
    "structural_tag of old": ("structural_tag", json.dumps(OLD_TAG)),
}
"""Name → (kind, value) of constraints that xgrammar enforces."""

OTHER_BACKEND: dict[str, tuple[str, Any, str]] = {
    "multiples": ("json_schema", '{"type": "integer", "multipleOf": 3}', "guidance"),
    "patterns with a length": ("json_schema", '{"type": "string", "pattern": "^a*$", "maxLength": 5}', "guidance"),
    "empty alternative": ("grammar", 'root ::= "a" |', "guidance"),
    "patterns of names": (
        "json_schema",
        '{"type": "object", "properties": {"b": {"enum": [1]}}, "patternProperties": {"^a$": {"enum": [1]}}, '
        '"required": ["b"], "additionalProperties": false}',
        "outlines",
    ),
}
"""Name → (kind, value, what vLLM 0.32 falls back to) of constraints that xgrammar does not enforce."""

BAD: dict[str, tuple[str, Any, str]] = {
    "no json": ("json_schema", "{", "Invalid JSON grammar specification."),
    "empty json": ("json_schema", " ", "structured_outputs.json cannot be an empty string"),
    "no schema": ("json_schema", "3", "Invalid grammar specification: Expecting object schema"),
    "lost reference": ("json_schema", '{"$ref": "#/$defs/x"}', "Grammar error: Pointer '/$defs/x' does not exist"),
    "unsatisfiable": ("json_schema", '{"$defs": {"x": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"}', "no token of"),
    "deep json": ("json_schema", '{"items":' * 500 + "{}" + "}" * 500, "The JSON schema is nested too deeply"),
    "very deep json": (
        "json_schema",
        '{"items":' * 90_000 + "{}" + "}" * 90_000,
        "The JSON schema is nested too deeply",
    ),
    "no object": ("json_object", False, "structured_outputs.json_object must be True"),
    "unbalanced": ("regex", "(unbalanced", "Grammar error"),
    "NUL in a regex": ("regex", "a\x00b", "structured_outputs.regex must not contain a NUL"),
    "no choice": ("choice", [], "Choice '[]' cannot be an empty list"),
    "empty grammar": ("grammar", " \n", "structured_outputs.grammar cannot be an empty string"),
    "no grammar": ("grammar", "root ::= (((", "Invalid grammar specification: Failed to convert"),
    "no such rule": ("grammar", "root ::= missing", "Invalid grammar specification: Failed to convert"),
    "no backend": ("json_schema", '{"type": "array", "uniqueItems": true}', "Grammar error: Unimplemented keys"),
    "empty tag": ("structural_tag", "", "structured_outputs.structural_tag cannot be an empty string"),
    "no tag": ("structural_tag", "{}", "Invalid grammar specification"),
    "tag of another kind": ("structural_tag", '{"type": "structural_tag", "format": {"type": "nonsense"}}', "Invalid"),
}
"""Name → (kind, value, how vLLM's reason begins)."""

HOSTILE: dict[str, tuple[str, str, Any, str]] = {
    "masks of seconds": ("", "regex", "(.{1,20}a?){20}", "one token takes"),
    "masks of seconds behind a prefix": ("", "regex", "[0-9]{40}(.{1,20}a?){20}", "one token takes"),
    "a pattern that compiles for minutes": (
        "",
        "json_schema",
        '{"type": "object", "properties": {"p": {"type": "string", "pattern": "^(.{1,20}a?){20}$"}}, "required": ["p"]}',
        "checking it takes more than 10 s of CPU time",
    ),
    "a ring of 20,000 rules": (
        "guidance",
        "grammar",
        "root ::= r0\n" + "\n".join(f'r{i} ::= "a{i}" r{(i + 1) % 20_000} | "b"' for i in range(20_000)),
        "it crashes the code that would enforce it (SIGSEGV)",
    ),
}
"""Name → (latched backend, kind, value, how the reason begins) of what vLLM's own validation accepts."""
