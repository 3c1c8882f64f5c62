"""The process behind `frontend.grammar_check`: compiles grammars to see whether they can be.

A script of its own that imports nothing of Toka. Its argument is how many token ids there are. Standard input has
grammars and standard output what is wrong with each (nothing, where it is fine), both UTF-8 behind four bytes of
length. A grammar that takes too much of anything ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

CPU_SECONDS = 4
"""For one grammar."""
MEMORY_BYTES = 2 << 30
STACK_BYTES = 2 << 20
"""Less than the matcher has for it: what this suffices for does not overflow that."""

_PR_SET_NAME = 15


class _Bytes:
    """A vocabulary in which text is single bytes and all other ids are special: it compiles in no time."""

    def __init__(self, ids: int) -> None:
        self.eos_token_id, self.bos_token_id = ids, None
        self.tokens = [bytes([value]) for value in range(256)] + [b"<%d>" % value for value in range(256, ids + 1)]
        self.special_token_ids = range(256, ids + 1)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"toka: grammars", 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(int(sys.argv[1]))), slices=[])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while size := source.read(4):
        grammar, said = source.read(int.from_bytes(size, "big")).decode(), [""]
        thread = threading.Thread(target=_compile, args=(tokenizer, grammar, said))
        _limit_cpu()
        thread.start()
        thread.join()
        answer = said[0].encode()
        sink.write(len(answer).to_bytes(4, "big") + answer)
        sink.flush()


def _limit_cpu() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _compile(tokenizer: LLTokenizer, grammar: str, said: list[str]) -> None:
    """Compile `grammar` and find the first tokens it allows; the error goes to `said`."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error():
        matcher.compute_bitmask()
    said[0] = matcher.get_error()


if __name__ == "__main__":
    main()
