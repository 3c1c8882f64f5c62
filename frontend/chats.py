"""A chat request to what its template is given."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frontend.errors import wrong
from frontend.schema import ChatMessage, ChatRequest
from frontend.tool_formats import DEFAULT_FORMAT, ToolFormat, described, written
from frontend.tools import Toolbox, template_calls
from toka.text.chat import RESERVED, Message, Rendering

MESSAGES_AT_ONCE = 64
"""Messages looked at before other tasks of the event loop get their turn."""
PART_SEPARATOR = "\n"
"""Between the text parts of one message."""


@dataclass(frozen=True, slots=True)
class Chat:
    messages: list[Message]
    rendering: Rendering
    template: str | None
    """The client's own; None: the model's."""

    @property
    def begun(self) -> str:
        """What the client began of the answer."""
        return str(self.messages[-1]["content"]) if self.rendering.continue_final_message else ""


def check(request: ChatRequest) -> None:
    """Raises ApiError that names the field which does not fit the others or what is supported."""
    if request.modalities not in (None, ["text"]):
        raise wrong("modalities", 'only ["text"] is supported', "unsupported_parameter")
    if request.top_logprobs is not None and not request.logprobs:
        raise wrong("top_logprobs", "needs logprobs to be true")


async def chat(request: ChatRequest, client_template: bool, box: Toolbox | None, form: ToolFormat | None) -> Chat:
    """`client_template`: whether the request may bring one. `form`: how the template has tools; None: not at all.

    Raises ApiError that names the field which is wrong.
    """
    if request.chat_template is not None and not client_template:
        message = "templates of clients are not taken; the server's setting client_chat_template allows them"
        raise wrong("chat_template", message, "unsupported_parameter")
    for name in RESERVED.intersection(request.chat_template_kwargs or {}):
        raise wrong(f"chat_template_kwargs.{name}", "is made from other fields of the request")
    messages: list[Message] = []
    for place, each in enumerate(request.messages):
        try:
            messages += _apart(_message(each, f"messages[{place}]", form), form)
        except RecursionError:
            raise wrong(f"messages[{place}].tool_calls", "nested too deeply") from None
        if place % MESSAGES_AT_ONCE == 0:
            await asyncio.sleep(0)
    if box is not None and form is None:
        try:
            messages = await asyncio.to_thread(_with_tools_described, messages, box)
        except RecursionError:
            raise wrong("tools", "nested too deeply") from None
    tools = box.described() if box is not None and form is not None else None
    return Chat(messages, _rendering(request, tools), request.chat_template)


def characters(message: ChatMessage) -> int:
    content = message.content or ""
    text = len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content)
    calls = sum(len(call.function.arguments) for call in message.tool_calls or ())
    return text + len(message.reasoning_content or "") + calls


def max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if None not in (old, new) and old != new:
        raise wrong("max_tokens", f"{old} differs from max_completion_tokens, {new}")
    return old if new is None else new


def _rendering(request: ChatRequest, tools: Sequence[Mapping[str, Any]] | None) -> Rendering:
    """A last message of the assistant is continued, unless it calls tools or the request says what is to come."""
    prompt, goes_on = request.add_generation_prompt, request.continue_final_message
    last = request.messages[-1]
    by_assistant = last.role == "assistant" and not last.tool_calls
    if goes_on is None:
        goes_on = by_assistant and prompt is None
    elif goes_on and prompt:
        raise wrong("continue_final_message", "excludes add_generation_prompt")
    elif goes_on and not by_assistant:
        raise wrong("continue_final_message", "the last message is not text of the assistant's")
    return Rendering(
        add_generation_prompt=prompt is not False and not goes_on,
        continue_final_message=goes_on,
        tools=tools,
        variables=request.chat_template_kwargs or {},
    )


def _with_tools_described(messages: list[Message], box: Toolbox) -> list[Message]:
    """Tools described in the system's message, for a template that does not do it."""
    text = described(DEFAULT_FORMAT, box.described())
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]


def _message(message: ChatMessage, field: str, form: ToolFormat | None) -> Message:
    """The message as chat templates take it."""
    if message.role == "tool" and not message.tool_call_id:
        raise wrong(f"{field}.tool_call_id", "missing")
    if message.tool_calls and message.role != "assistant":
        raise wrong(f"{field}.tool_calls", "only the assistant calls tools")
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    given: dict[str, Any] = {key: value for key, value in optional.items() if value is not None}
    text = _text(message, f"{field}.content")
    if message.tool_calls:
        calls = template_calls(message.tool_calls, f"{field}.tool_calls")
        if form is None:
            text = "\n".join([*filter(None, [text]), *(_written(call["function"]) for call in calls)])
        else:
            given["tool_calls"] = calls
    return {"role": message.role, "content": text} | given


def _apart(message: Message, form: ToolFormat | None) -> list[Message]:
    """The message, or several with a call each, where the template wants it so."""
    calls = message.get("tool_calls", ())
    if form is None or not form.one_a_message or len(calls) < 2:
        return [message]
    return [{**message, "tool_calls": [call]} for call in calls]


def _written(function: Mapping[str, Any]) -> str:
    return written(DEFAULT_FORMAT, function["name"], function["arguments"])


def _text(message: ChatMessage, field: str) -> str:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise wrong(field, "missing")
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content):
        if part.type != "text":
            raise wrong(f"{field}[{place}].type", f"only text is supported, got {part.type!r}", "unsupported_parameter")
        if part.text is None:
            raise wrong(f"{field}[{place}].text", "missing")
        texts.append(part.text)
    return PART_SEPARATOR.join(texts)
