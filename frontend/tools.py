"""The tools of a chat request, and which of them may or must be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from frontend.errors import wrong
from frontend.schema import AllowedTools, ChatRequest, Tool, ToolCall, ToolChoice

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    tools: Sequence[Tool]
    names: frozenset[str]
    """Of those that may be called."""
    required: bool
    """Whether at least one has to be called."""
    named: bool
    """Whether the request says which."""
    parallel: bool
    """Whether there may be several calls in an answer."""

    @property
    def callable(self) -> list[tuple[int, Tool]]:
        return [(place, tool) for place, tool in enumerate(self.tools) if tool.function.name in self.names]

    @property
    def held(self) -> bool:
        """Whether calls are held to something."""
        strict = any(tool.function.strict for _, tool in self.callable)
        return self.required or strict or not self.parallel or len(self.names) < len(self.tools)

    def parameters(self, place: int) -> Mapping[str, Any]:
        """The schema of a tool's arguments."""
        schema = self.tools[place].function.parameters
        return NO_PARAMETERS if schema is None else {"type": "object", **schema}

    def described(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.function.name,
                    "description": tool.function.description or "",
                    "parameters": self.parameters(place),
                },
            }
            for place, tool in enumerate(self.tools)
        ]


def toolbox(request: ChatRequest) -> Toolbox | None:
    """None where no tool may be called. Raises ApiError that names the field which is wrong."""
    tools, choice = request.tools, request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise wrong("tool_choice", "needs tools")
        if request.parallel_tool_calls is not None:
            raise wrong("parallel_tool_calls", "needs tools")
        return None
    names: set[str] = set()
    for place, tool in enumerate(tools):
        if tool.function.name in names:
            raise wrong(f"tools[{place}].function.name", f"{tool.function.name!r} is the name of another tool, too")
        if (tool.function.parameters or {}).get("type", "object") != "object":
            raise wrong(f"tools[{place}].function.parameters", 'type: must be "object"')
        names.add(tool.function.name)
    if choice == "none":
        return None
    required, named = choice == "required", False
    if isinstance(choice, ToolChoice):
        names, required, named = _chosen(choice, names)
    return Toolbox(
        tools=tools,
        names=frozenset(names),
        required=required,
        named=named,
        parallel=request.parallel_tool_calls is not False and not named,
    )


def template_calls(calls: Sequence[ToolCall], field: str) -> list[dict[str, Any]]:
    """Calls of an earlier answer as chat templates take them; ApiError where their arguments are no JSON object."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": _object(call.function.arguments, f"{field}[{place}].function.arguments"),
            },
        }
        for place, call in enumerate(calls)
    ]


def _chosen(choice: ToolChoice, names: set[str]) -> tuple[set[str], bool, bool]:
    """The names that may be called, whether one must be, and whether it is a certain one."""
    if choice.type == "function":
        if choice.function is None or choice.allowed_tools is not None:
            raise wrong("tool_choice.function", "needed for this type, and nothing else")
        return {_known(choice.function.name, names, "tool_choice.function.name")}, True, True
    if choice.allowed_tools is None or choice.function is not None:
        raise wrong("tool_choice.allowed_tools", "needed for this type, and nothing else")
    return _allowed(choice.allowed_tools, names), choice.allowed_tools.mode == "required", False


def _allowed(allowed: AllowedTools, names: set[str]) -> set[str]:
    field = "tool_choice.allowed_tools.tools"
    return {
        _known(each.function.name, names, f"{field}[{place}].function.name") for place, each in enumerate(allowed.tools)
    }


def _known(name: str, names: set[str], field: str) -> str:
    if name not in names:
        raise wrong(field, f"{name!r} is none of the tools")
    return name


def _object(arguments: str, field: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise wrong(field, f"must be a JSON object: {error}") from None
