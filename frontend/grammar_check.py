"""Whether grammars compile, found out in a process of its own.

A few hundred bytes of schema can take the compiler minutes, gigabytes or its whole stack; the process ends then,
under limits of its own, and the next grammar gets another one. It starts with the first grammar and ends with
its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from pathlib import Path

from frontend.errors import ApiError

LARGEST_GRAMMAR = 1 << 19
"""Bytes."""
REMEMBERED = 4096
"""Grammars whose verdicts are known ..."""
LONGEST_VERDICT = 300
"""... in so many characters."""
MOST_WAITING = 128
"""Different grammars that wait for their turn."""
ANSWER_SECONDS = 60.0
"""The process limits its own processor time; this is for a machine that does not let it run."""
TOO_MUCH = "takes too much time or memory to compile"
_GUILTY = {-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL}
"""How the process ends because of a grammar; as it does with status 1, where Python has no memory left."""
_WORDS = (
    (re.compile(r"(?s)(\n<.*|\n *\d+ \|.*|; following special tokens.*|\. Enable '.*)"), ""),
    (re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?"), ""),
    (re.compile(r"^NoExtension\w*"), "nothing can match it"),
    (re.compile(r"^panic: .*"), "it is too large"),
    (re.compile(r"^recursion limit exceeded.*"), "it is nested too deeply"),
    (re.compile(r"^(Resource|Pointer) '"), r"$ref: \1 '"),
    (re.compile(r"(?s)^(invalid regex .* \(in regex\): )?regex parse error:.*error: "), "the pattern is wrong: "),
    (re.compile(r"\s+"), " "),
)
"""What the compiler says, in words for those who do not know it."""

log = logging.getLogger(__name__)


class GrammarChecker:
    """`ids`: how many token ids there are."""

    def __init__(self, ids: int) -> None:
        self._ids = ids
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[str]] = {}
        self._turn = asyncio.Lock()
        self._child: Process | None = None

    async def check(self, grammar: str) -> str:
        """What is wrong with it, in a sentence; empty where it compiles. ApiError where that cannot be told now."""
        content = grammar.encode()
        if len(content) > LARGEST_GRAMMAR:
            return f"{len(content)} bytes; at most {LARGEST_GRAMMAR}"
        key = hashlib.blake2b(content, digest_size=16).digest()
        if (known := self._verdicts.get(key)) is not None:
            self._verdicts.move_to_end(key)
            return known
        if key not in self._asked:
            if len(self._asked) >= MOST_WAITING:
                raise ApiError(429, "too many new grammars are waiting", retry_after=1)
            self._asked[key] = asyncio.create_task(self._find(key, content))
        # Who asked may go away; others may wait for the same.
        return await asyncio.shield(self._asked[key])

    async def close(self) -> None:
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        if self._child is not None:
            await self._end(self._child)

    async def _find(self, key: bytes, content: bytes) -> str:
        try:
            async with self._turn:
                verdict = _in_words(await self._ask(content))
        finally:
            del self._asked[key]
        self._verdicts[key] = verdict
        if len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)
        return verdict

    async def _ask(self, content: bytes) -> str:
        child = self._child
        if child is None or child.returncode is not None:
            script = str(Path(__file__).with_name("grammar_child.py"))
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-P", script, str(self._ids), stdin=PIPE, stdout=PIPE, stderr=DEVNULL
            )
            self._child = child
        assert child.stdin is not None and child.stdout is not None
        status = None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                child.stdin.write(len(content).to_bytes(4, "big") + content)
                await child.stdin.drain()
                size = int.from_bytes(await child.stdout.readexactly(4), "big")
                return (await child.stdout.readexactly(size)).decode()
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await child.wait()
        except BaseException as error:
            await self._end(child)
            if not isinstance(error, TimeoutError):
                raise
        log.warning("checking a grammar ended its process", extra={"status": status})
        if status in _GUILTY:
            return TOO_MUCH
        raise ApiError(503, "grammars cannot be checked just now", retry_after=1)

    @staticmethod
    async def _end(child: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def _in_words(error: str) -> str:
    for pattern, words in _WORDS:
        error = pattern.sub(words, error)
    return error.strip()[:LONGEST_VERDICT]
