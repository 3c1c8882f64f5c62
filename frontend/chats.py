"""A chat request to what its template is given."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from frontend.errors import wrong
from frontend.schema import ChatMessage, ChatRequest
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
    if request.response_format not in (None, {"type": "text"}):
        raise wrong("response_format", 'only {"type": "text"} is supported', "unsupported_parameter")
    if request.modalities not in (None, ["text"]):
        raise wrong("modalities", 'only ["text"] is supported', "unsupported_parameter")
    if request.top_logprobs is not None and not request.logprobs:
        raise wrong("top_logprobs", "needs logprobs to be true")


async def chat(request: ChatRequest, client_template: bool) -> Chat:
    """`client_template`: whether the request may bring one. Raises ApiError that names the field which is wrong."""
    if request.chat_template is not None and not client_template:
        message = "templates of clients are not taken; the server's setting client_chat_template allows them"
        raise wrong("chat_template", message, "unsupported_parameter")
    for name in RESERVED.intersection(request.chat_template_kwargs or {}):
        raise wrong(f"chat_template_kwargs.{name}", "is made from other fields of the request")
    messages: list[Message] = []
    for each in request.messages:
        messages.append(_message(each, f"messages[{len(messages)}]"))
        if len(messages) % MESSAGES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return Chat(messages, _rendering(request), request.chat_template)


def characters(message: ChatMessage) -> int:
    content = message.content or ""
    text = len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content)
    return text + len(message.reasoning_content or "")


def max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if None not in (old, new) and old != new:
        raise wrong("max_tokens", f"{old} differs from max_completion_tokens, {new}")
    return old if new is None else new


def _rendering(request: ChatRequest) -> Rendering:
    """A last message of the assistant is continued, unless the request says what is to come behind it."""
    prompt, goes_on = request.add_generation_prompt, request.continue_final_message
    by_assistant = request.messages[-1].role == "assistant"
    if goes_on is None:
        goes_on = by_assistant and prompt is None
    elif goes_on and prompt:
        raise wrong("continue_final_message", "excludes add_generation_prompt")
    elif goes_on and not by_assistant:
        raise wrong("continue_final_message", "the last message is not the assistant's")
    return Rendering(
        add_generation_prompt=prompt is not False and not goes_on,
        continue_final_message=goes_on,
        variables=request.chat_template_kwargs or {},
    )


def _message(message: ChatMessage, field: str) -> Message:
    """The message as chat templates take it."""
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    given = {key: value for key, value in optional.items() if value is not None}
    return {"role": message.role, "content": _text(message, f"{field}.content")} | given


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
