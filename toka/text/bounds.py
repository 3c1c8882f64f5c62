"""Templates that end: a sandbox that counts the turns of loops and calls, and the characters that come out.

What a single expression makes is bounded where it multiplies; a client's template is taken only where the
operator says so, as one that doubles a text often enough still takes much memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_TURNS = 1_000_000
MOST_CHARACTERS = 1 << 26
LONGEST_PRODUCT = 1 << 20
"""Items of a text or list that is multiplied."""
_POWER_BITS = 64


class _Context(Context):
    turns = 0


class _Template(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        return "".join(self._bounded(self.generate(*args, **kwargs)))

    def _bounded(self, pieces: Iterator[str]) -> Iterator[str]:
        length = 0
        for piece in pieces:
            length += len(piece)
            if length > MOST_CHARACTERS:
                raise SecurityError(f"it writes more than {MOST_CHARACTERS} characters")
            yield piece


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Templates made here raise SecurityError where they go on for too long."""

    context_class = _Context
    template_class = _Template
    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for body in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            repeated = cast("nodes.For | nodes.Macro | nodes.CallBlock", body)
            turn = nodes.Call(nodes.EnvironmentAttribute("turn"), [nodes.ContextReference()], [], None, None)
            repeated.body.insert(0, nodes.ExprStmt(turn, lineno=repeated.lineno))
        return template

    @staticmethod
    def turn(context: _Context) -> None:
        """Called at every turn of a loop and every call of a macro."""
        context.turns += 1
        if context.turns > MOST_TURNS:
            raise SecurityError(f"its loops take more than {MOST_TURNS} turns")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                sequence = isinstance(text, str | list | tuple) and isinstance(times, int)
                if sequence and len(text) * times > LONGEST_PRODUCT:
                    raise SecurityError(f"it makes a text or list longer than {LONGEST_PRODUCT}")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _POWER_BITS:
            raise SecurityError(f"it makes a number of more than {_POWER_BITS} bits")
        return super().call_binop(context, operator, left, right)
