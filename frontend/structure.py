"""What an answer has to be like, and how it is read: text of some form, calls of tools, or either."""

from __future__ import annotations

from dataclasses import dataclass

from frontend import tool_formats
from frontend.errors import wrong
from frontend.grammars import Grammar, Thoughts, wanted
from frontend.schema import ChatRequest, Sampling
from frontend.tool_calls import CallReader
from frontend.tool_formats import DEFAULT_FORMAT, ToolFormat
from frontend.tools import Toolbox
from toka.text.reasoning import may_think
from toka.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How calls are found in the answers to a request."""

    form: ToolFormat
    box: Toolbox
    early: bool
    at_start: bool
    skipped: frozenset[int]
    """Special tokens that are no text: all but the marks of calls."""

    def reader(self) -> CallReader:
        return CallReader(self.form, self.box.names, early=self.early, at_start=self.at_start)


def text_grammar(request: Sampling) -> Grammar | None:
    """What holds an answer without tools; None: nothing does. Raises ApiError as `wanted` does."""
    body = wanted(request)
    return None if body is None else Grammar("answer: @body", {"body": body})


def chat_grammar(
    request: ChatRequest, box: Toolbox | None, form: ToolFormat | None, vocabulary: Vocabulary
) -> Grammar | None:
    """As `text_grammar`, with the tools of `box`. Raises ApiError where they exclude what is wanted of the text."""
    if box is None:
        return text_grammar(request)
    body = wanted(request)
    if body is not None and box.required:
        raise wrong(body.field, "excludes a tool_choice that requires a call")
    if body is not None and body.field != "response_format":
        raise wrong(body.field, 'excludes tools, unless tool_choice is "none"')
    if body is None and not box.held:
        return None
    return tool_formats.grammar(form or DEFAULT_FORMAT, box, vocabulary, body)


def tool_use(box: Toolbox, form: ToolFormat | None, vocabulary: Vocabulary, *, early: bool, at_start: bool) -> ToolUse:
    """`form`: that of the template, if it has one; `early` and `at_start` as CallReader takes them."""
    form = form or DEFAULT_FORMAT
    marks = {vocabulary.token(mark) for mark in (form.mark, form.end_mark) if mark}
    return ToolUse(form=form, box=box, early=early, at_start=at_start, skipped=vocabulary.special - marks)


def thoughts(inside: bool | None, prompt: str, begun: str) -> Thoughts:
    """What may come before the answer behind a rendered `prompt`, with `begun` already written by the client.

    inside: whether the prompt ends within a think block; None for models that have none.
    """
    if inside is None:
        return Thoughts.NONE
    if inside:
        return Thoughts.REST
    return Thoughts.OPTIONAL if may_think(prompt, begun) else Thoughts.NONE
