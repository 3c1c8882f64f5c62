"""Text formats of JSON schemas where the compiler of grammars is laxer than those who validate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LEAP_YEAR = "(..(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = f"(.{{5}}(0[13-9]|1.)-..|.{{8}}([01].|2[0-8])|{_LEAP_YEAR}-02-29)"
_PATTERNS = {
    "date": f"^{_DAY}$",
    # A leap second is one at the end of a day in UTC alone.
    "time": "^.{6}[0-5]",
    "date-time": f"^{_DAY}.{{7}}[0-5]",
    # RFC 5321 and RFC 1035 limit the parts of an address.
    "email": r"^[^@]{1,64}@([^.@]{1,63}\.)*[^.@]{1,63}$",
}
_SCHEMAS = frozenset({"items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"})
"""Keywords with a schema or a list of them ..."""
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""... and with schemas by name."""


def exact(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema`, with patterns beside the formats that need them."""
    found = {keyword: _inner(keyword, value) for keyword, value in schema.items()}
    kind = found.get("format")
    pattern = _PATTERNS.get(kind) if isinstance(kind, str) else None
    if pattern is None:
        return found
    others = found.get("allOf", [])
    return {**found, "allOf": [*others, {"pattern": pattern}]} if isinstance(others, list) else found


def _inner(keyword: str, value: Any) -> Any:
    if keyword in _SCHEMAS:
        return [_exact_if_schema(each) for each in value] if isinstance(value, list) else _exact_if_schema(value)
    if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
        return {name: _exact_if_schema(each) for name, each in value.items()}
    return value


def _exact_if_schema(value: Any) -> Any:
    return exact(value) if isinstance(value, dict) else value
