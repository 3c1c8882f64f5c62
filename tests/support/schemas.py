"""Random JSON schemas of the keywords that OpenAI's strict mode allows."""

from __future__ import annotations

import random
from typing import Any

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
PATTERNS = ("^[a-z]{2,5}$", r"^\d{3}-\d{4}$", "^(foo|bar)+$", "a.c", "^@[a-zA-Z0-9_]+$")
NAMES = ("name", "größe", "x y", 'a"b')
Schema = dict[str, Any]


def schema(chance: random.Random) -> Schema:
    """An object at the root, as strict mode wants it, some of them recursive."""
    root = _object(chance, 3)
    if chance.random() < 0.3:
        node = {"type": "object", "properties": {"value": _scalar(chance)}, "additionalProperties": False}
        node["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
        node["required"] = ["value", "next"]
        root["$defs"] = {"node": node}
        root["properties"]["list"] = {"$ref": "#/$defs/node"}
        root["required"].append("list")
    return root


def _any(chance: random.Random, depth: int) -> Schema:
    kinds = [_scalar, _scalar] if not depth else [_scalar, _object, _array, _any_of, _nullable]
    kind = chance.choice(kinds)
    found = kind(chance) if kind is _scalar else kind(chance, depth - 1)
    if chance.random() < 0.2:
        found["description"] = "a value"
    return found


def _object(chance: random.Random, depth: int) -> Schema:
    names = [f"{chance.choice(NAMES)}{number}" for number in range(chance.randint(0, 4))]
    properties = {name: _any(chance, depth) for name in names}
    required = names if chance.random() < 0.8 else names[: len(names) // 2]
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _array(chance: random.Random, depth: int) -> Schema:
    found: Schema = {"type": "array", "items": _any(chance, depth)}
    if chance.random() < 0.5:
        found["minItems"] = chance.randint(0, 3)
        found["maxItems"] = found["minItems"] + chance.randint(0, 3)
    return found


def _any_of(chance: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(chance, depth) for _ in range(chance.randint(1, 3))]}


def _nullable(chance: random.Random, depth: int) -> Schema:
    return {"type": [chance.choice(("string", "integer", "boolean", "number")), "null"]}


def _scalar(chance: random.Random) -> Schema:
    return chance.choice(
        (_string, _number, _integer, _enum, lambda _: {"type": "boolean"}, lambda _: {"type": "null"})
    )(chance)


def _string(chance: random.Random) -> Schema:
    more = chance.choice(
        (
            {},
            {"pattern": chance.choice(PATTERNS)},
            {"format": chance.choice(FORMATS)},
            {"minLength": chance.randint(0, 5), "maxLength": chance.randint(5, 20)},
        )
    )
    return {"type": "string", **more}


def _number(chance: random.Random) -> Schema:
    least = round(chance.uniform(-100, 100), chance.randint(0, 3))
    more = chance.choice(
        (
            {},
            {"minimum": least},
            {"exclusiveMaximum": least},
            {"minimum": least, "maximum": least + 10.5},
            {"multipleOf": 0.5},
        )
    )
    return {"type": "number", **more}


def _integer(chance: random.Random) -> Schema:
    least = chance.randint(-1000, 1000)
    more = chance.choice(
        (
            {},
            {"exclusiveMinimum": least},
            {"minimum": least, "maximum": least + chance.randint(0, 99)},
            {"multipleOf": 7},
        )
    )
    return {"type": "integer", **more}


def _enum(chance: random.Random) -> Schema:
    values = chance.sample(["red", "green", "a\nb", "", 'quo"te', 5, -1.5, True, None, "🦜"], chance.randint(1, 4))
    return {"const": values[0]} if chance.random() < 0.3 else {"enum": values}
