"""How models write calls of tools. Adding a format is adding an entry to FORMATS.

A call is a JSON object with the tool's name and its arguments, within marks. `grammar` makes what the engine holds a
model to; `frontend.tool_calls` finds calls in what it has written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from frontend.grammars import ANY_TEXT, OBJECT, Grammar, Part, literal, marked
from frontend.tools import Toolbox
from toka.text.vocabulary import Vocabulary

NAME = "name"
NO_BRACE_FIRST = rf"(\s*[^\s{{]{ANY_TEXT})?"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    known_by: tuple[str, ...]
    """What a chat template has that describes tools in this format ..."""
    unlike: str = ""
    """... and what it does not have."""
    mark: str
    """Before a call."""
    bare: bool = False
    """Whether a call at the beginning of an answer, or behind another one, needs no mark."""
    opening: str = ""
    """Between the mark and the object."""
    closing: str = ""
    """Behind the object; its mark, if it has one, is `end_mark`."""
    end_mark: str = ""
    between: str
    one_a_message: bool = False
    """Whether templates refuse messages with several calls."""
    arguments: str
    """The name under which the object has the arguments."""


HERMES = ToolFormat(
    known_by=("<tool_call>", "arguments"),
    unlike="<function=",
    mark="<tool_call>",
    opening="\n",
    closing="\n",
    end_mark="</tool_call>",
    between="\n",
    arguments="arguments",
)
"""Of Qwen 2.5 and Qwen 3."""
LLAMA3 = ToolFormat(
    known_by=("parameters", "ipython"),
    mark="<|python_tag|>",
    bare=True,
    between="; ",
    one_a_message=True,
    arguments="parameters",
)
"""Of Llama 3.1 to 3.3."""
FORMATS = (HERMES, LLAMA3)
DEFAULT_FORMAT = HERMES
"""For models whose template describes no tools."""


def of_template(source: str) -> ToolFormat | None:
    """The format that a chat template describes tools in; None where it describes none, or in another one."""
    if "tools" not in source:
        return None
    for each in FORMATS:
        if all(mark in source for mark in each.known_by) and not (each.unlike and each.unlike in source):
            return each
    return None


def written(form: ToolFormat, name: str, arguments: object) -> str:
    """A call as a model writes it."""
    call = json.dumps({NAME: name, form.arguments: arguments}, ensure_ascii=False)
    mark = "" if form.bare else form.mark
    return f"{mark}{form.opening}{call}{form.closing}{form.end_mark}"


def described(form: ToolFormat, tools: Sequence[object]) -> str:
    """Tools and how to call them, for a model whose template does not say it."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = written(form, "name of the function", {"name of the argument": "value"})
    return (
        f"# Tools\n\nYou may call functions. They are described here, one a line, as JSON:\n<tools>\n{lines}\n</tools>"
        f"\n\nTo call a function, answer with its name and arguments as JSON, like this:\n{example}"
    )


def grammar(form: ToolFormat, box: Toolbox, vocabulary: Vocabulary, answer: Part | None) -> Grammar:
    """Holds an answer to calls of the tools of `box`.

    Where none is required, it may be text as well, with a call at its end: or what `answer` says, instead of a call.
    """
    mark = literal(form.mark, vocabulary)
    first = "call" if form.bare else f"{mark} call"
    more = f"({json.dumps(form.between)} {first})*" if box.parallel else ""
    end = literal(form.end_mark, vocabulary) if form.end_mark else ""
    parts: dict[str, Part] = {}
    alternatives = []
    for place, tool in box.callable:
        part, name = f"arguments{place}", json.dumps(tool.function.name)
        parts[part] = _arguments(place, box)
        alternatives.append(f'{json.dumps(name)} ", " {json.dumps(json.dumps(form.arguments))} ": " @{part}')
    rules = [
        f"calls: call {more}",
        f'call: {_quoted(form.opening)} "{{" "\\"{NAME}\\"" ": " ({" | ".join(alternatives)}) "}}" '
        f"{_quoted(form.closing)} {end}",
    ]
    if box.required:
        rules.append(f"answer: {first} {more}")
    elif answer is not None:
        parts["body"] = answer
        rules.append(f"answer: {first} {more} | @body")
    else:
        text = NO_BRACE_FIRST if form.bare else ANY_TEXT
        begun = marked(form.mark, vocabulary, text)
        bare = "| calls" if form.bare else ""
        rules += [f"answer: TEXT | begun calls {bare}", f"TEXT: /{text}/", f"begun: {begun.rule}", begun.definitions]
    return Grammar("\n".join(rules), parts)


def _arguments(place: int, box: Toolbox) -> Part:
    tool = box.tools[place]
    held = box.required or bool(tool.function.strict)
    schema = box.parameters(place) if held else OBJECT
    return Part(f"tools[{place}].function.parameters", schema=schema, spaced=True)


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
