"""A request to `/v1/responses` as the chat that it is: instructions and items of input become messages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from frontend.chats import MESSAGES_AT_ONCE, PART_SEPARATOR
from frontend.errors import ApiError, wrong
from frontend.jobs import Job, Planner
from frontend.response_schema import FunctionTool, InputItem, InputPart, ResponseRequest, ResponseToolChoice, TextFormat
from frontend.schema import (
    MOST_TOOLS,
    AllowedTools,
    CalledFunction,
    ChatMessage,
    ChatRequest,
    Function,
    JsonSchema,
    Named,
    ResponseFormat,
    Sampling,
    Tool,
    ToolCall,
    ToolChoice,
    ToolReference,
)
from frontend.tools import arguments_of
from toka.messages import ModelCard

T = TypeVar("T")

LOGPROBS = "message.output_text.logprobs"
TEXT_PARTS = ("input_text", "output_text")
TYPES = ("message", "function_call", "function_call_output", "reasoning")
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Fields of a chat, by which its errors call what has other names here."""
_LEVELS = re.compile(r"\.(function|allowed_tools|json_schema)\b")
"""What stands between a field's names in a chat alone."""


async def plan(request: ResponseRequest, planner: Planner, card: ModelCard) -> Job:
    """Raises ApiError that names the field which is wrong."""
    _check(request)
    chat = await _chat(request)
    try:
        return await planner.chat(chat, card)
    except ApiError as error:
        raise _renamed(error) from None


def tools_of(request: ResponseRequest) -> list[FunctionTool]:
    """The request's tools, with `strict` as it holds."""
    return [msgspec.structs.replace(tool, strict=tool.strict is not False) for tool in request.tools or ()]


def _check(request: ResponseRequest) -> None:
    if not request.input:
        raise wrong("input", "must not be empty")
    if request.store:
        message = "nothing is kept, so that no answer can be asked for later; send the conversation with each request"
        raise wrong("store", message, "unsupported_parameter")
    if request.background:
        raise wrong("background", "nothing is kept, so that an answer can only be waited for", "unsupported_parameter")
    if request.stream_options is not None:
        if not request.stream:
            raise wrong("stream_options", "needs stream to be true")
        if request.stream_options.include_obfuscation:
            raise wrong("stream_options.include_obfuscation", "only false is supported", "unsupported_parameter")
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        raise wrong("top_logprobs", f"needs {LOGPROBS!r} in include")


async def _chat(request: ResponseRequest) -> ChatRequest:
    shared = {name: getattr(request, name) for name in Sampling.__struct_fields__}
    logprobs = LOGPROBS in (request.include or ())
    own = {
        "messages": await _messages(request),
        "stream_options": None,
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": logprobs,
        "top_logprobs": request.top_logprobs if logprobs else None,
        "response_format": _format(request.text.format) if request.text and request.text.format else None,
        "tools": [_tool(tool) for tool in tools_of(request)] or None,
        "tool_choice": _choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls if request.tools else None,
        "add_generation_prompt": True,
        "chat_template": request.chat_template,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    return ChatRequest(**(shared | own))


async def _messages(request: ResponseRequest) -> list[ChatMessage]:
    messages = [] if request.instructions is None else [ChatMessage(role="system", content=request.instructions)]
    if isinstance(request.input, str):
        return [*messages, ChatMessage(role="user", content=request.input)]
    turn: ChatMessage | None = None
    """What the assistant has said and called, item by item, since somebody else's last message."""
    for place, item in enumerate(request.input or ()):
        if place % MESSAGES_AT_ONCE == MESSAGES_AT_ONCE - 1:
            await asyncio.sleep(0)
        field = f"input[{place}]"
        before = turn
        message, turn = _message(item, field, turn)
        if message is not before:
            messages.append(message)
    return messages


def _message(item: InputItem, field: str, turn: ChatMessage | None) -> tuple[ChatMessage, ChatMessage | None]:
    """The message that an item is part of, and the turn of the assistant's that the next one may go on with."""
    kind = item.type or "message"
    if kind not in TYPES:
        raise wrong(f"{field}.type", f"expected one of {', '.join(TYPES)}, got {kind!r}", "unsupported_parameter")
    if kind == "function_call_output":
        output, call = _text(item.output, f"{field}.output", TEXT_PARTS), _given(item.call_id, f"{field}.call_id")
        return ChatMessage(role="tool", content=output, tool_call_id=call), None
    if kind == "message":
        if item.role is None:
            raise wrong(f"{field}.role", "missing")
        text = _text(item.content, f"{field}.content", TEXT_PARTS)
        if item.role != "assistant":
            return ChatMessage(role=item.role, content=text), None
        if turn is None or turn.content is not None or turn.tool_calls:
            turn = ChatMessage(role="assistant")
        turn.content = text
    elif kind == "reasoning":
        turn = ChatMessage(role="assistant")
        if item.content:
            turn.reasoning_content = _text(item.content, f"{field}.content", ("reasoning_text",))
    else:
        turn = turn or ChatMessage(role="assistant")
        turn.tool_calls = turn.tool_calls or []
        if len(turn.tool_calls) == MOST_TOOLS:
            raise wrong(field, f"more than {MOST_TOOLS} calls in one turn")
        turn.tool_calls.append(_call(item, field))
    return turn, turn


def _call(item: InputItem, field: str) -> ToolCall:
    name, call = _given(item.name, f"{field}.name"), _given(item.call_id, f"{field}.call_id")
    arguments = _given(item.arguments, f"{field}.arguments")
    arguments_of(arguments, f"{field}.arguments")
    return ToolCall(id=call, type="function", function=CalledFunction(name=name, arguments=arguments))


def _text(content: str | list[InputPart] | None, field: str, types: Sequence[str]) -> str:
    if content is None:
        raise wrong(field, "missing")
    if isinstance(content, str):
        return content
    for place, part in enumerate(content):
        if part.type not in types:
            message = f"only {' and '.join(types)} are supported here, got {part.type!r}"
            raise wrong(f"{field}[{place}].type", message, "unsupported_parameter")
    return PART_SEPARATOR.join(_given(part.text, f"{field}[{place}].text") for place, part in enumerate(content))


def _given(value: T | None, field: str) -> T:
    if value is None:
        raise wrong(field, "missing")
    return value


def _format(asked: TextFormat) -> ResponseFormat:
    if asked.type != "json_schema":
        if asked.schema is not None:
            raise wrong("text.format.schema", 'needs the type "json_schema"')
        return ResponseFormat(type=asked.type)
    schema, name = _given(asked.schema, "text.format.schema"), _given(asked.name, "text.format.name")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema, name=name))


def _tool(tool: FunctionTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return Tool(type="function", function=function)


def _choice(choice: str | ResponseToolChoice | None) -> str | ToolChoice | None:
    if not isinstance(choice, ResponseToolChoice):
        return choice
    if choice.type == "function":
        if choice.mode or choice.tools:
            raise wrong("tool_choice", "mode and tools need the type allowed_tools")
        return ToolChoice(type="function", function=Named(name=_given(choice.name, "tool_choice.name")))
    if choice.name is not None:
        raise wrong("tool_choice.name", "needs the type function")
    tools = _given(choice.tools, "tool_choice.tools")
    allowed = AllowedTools(
        mode=_given(choice.mode, "tool_choice.mode"),
        tools=[ToolReference(type="function", function=Named(name=tool.name)) for tool in tools],
    )
    return ToolChoice(type="allowed_tools", allowed_tools=allowed)


def _renamed(error: ApiError) -> ApiError:
    """An error about the chat, with the names that fields have here."""
    if error.param is None:
        return error
    head, dot, rest = _LEVELS.sub("", error.param).partition(".")
    name = _NAMES.get(head, head) + dot + rest
    message = name + error.message.removeprefix(error.param)
    return ApiError(error.status, message, param=name, code=error.code, retry_after=error.retry_after)
