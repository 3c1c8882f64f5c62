"""Chat templates: messages to the text that a model was trained on.

The environment is the one that `transformers` renders with (`apply_chat_template`), so that templates
written for it give the same text here. It is a sandbox, and `toka.text.bounds` ends what goes on for too long.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from toka.text.bounds import BoundedEnvironment

Message = Mapping[str, Any]
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that a template gets from elsewhere than `Rendering.variables`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How messages are rendered: with a new turn of the assistant begun, or with the last message left open."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further ones that the template may know, as Qwen 3's `enable_thinking`."""


NEW_TURN = Rendering()


class ChatTemplate:
    """A model's chat template. `special_tokens` are the variables (`bos_token`, ...) it may refer to.

    Raises ValueError where `source` is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # Jinja's and those of Python's compiler behind it
            raise ValueError(f"the chat template is wrong: {error}") from None
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._roles = {} if "developer" in source else {"developer": "system"}

    def render(self, messages: Sequence[Message], rendering: Rendering = NEW_TURN) -> str:
        """The text of `messages`; ValueError, in one sentence, where the template refuses them.

        The developer's are the system's where the template knows no developer. As `transformers` does it, a last
        message that is left open ends where the template would go on behind it, without white space that the
        template strips from its end.
        """
        if not rendering.continue_final_message:
            return self._text(messages, rendering)
        last, mark = messages[-1], secrets.token_hex(16)
        content = str(last["content"])
        text = self._text([*messages[:-1], {**last, "content": f"{content}{mark} "}], rendering)
        place = text.rfind(mark)
        if place < 0:
            raise ValueError("the chat template leaves out the message that is to be continued")
        if text.startswith(f"{mark} ", place):
            return text[:place]
        return text[:place].removesuffix(content[len(content.rstrip()) :])

    def _text(self, messages: Sequence[Message], rendering: Rendering) -> str:
        variables = {
            **self.special_tokens,
            **rendering.variables,
            "messages": [{**each, "role": self._roles.get(each["role"], each["role"])} for each in messages],
            "tools": rendering.tools,
            "documents": None,
            "add_generation_prompt": rendering.add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except SecurityError as error:
            raise ValueError(f"the chat template does what it must not: {error}") from None
        except Exception as error:  # a template can fail like any program; what it says is all there is to tell
            raise ValueError(f"the chat template refuses these messages: {error}") from None


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it only stands for its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
