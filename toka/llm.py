"""`toka.LLM`: generation from a script, without a server that one would have to start.

    with toka.LLM("Qwen/Qwen2.5-0.5B-Instruct") as llm:
        for output in llm.generate(["One", "Two"], toka.SamplingParams(max_tokens=20)):
            print(output.text)

Behind it Toka runs as processes of its own, as from the command line; this program only sends requests.
"""

from __future__ import annotations

import asyncio
import itertools
import numbers
import sys
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Self

import msgspec

from toka import config as settings
from toka.background import Background, Done, Put, Request, Run, putting
from toka.display import Bars, Quiet
from toka.outputs import Choice, GenerationError, Output, error_of, fill
from toka.params import SamplingParams
from toka.private import MODULE

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OWN = ("host", "port")
"""Settings that say nothing here: the server is reached by this program alone."""

UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""What msgspec raises for what JSON cannot hold."""

Errors = Literal["raise", "return"]
Params = SamplingParams | Iterable[SamplingParams] | None
Job = tuple[Any, SamplingParams, dict[str, Any]]
"""What there is to answer, how to sample, and the body of the request."""


class LLM:
    """A model that is loaded and ready, until `close`, the end of a `with` block, or the end of the program.

    `model` is a folder, a hub id or a .gguf file (the demo model where it is left out); `settings` are those of
    `toka --help`, by name. `progress` shows the start as `toka` does. ValueError for a wrong setting, RuntimeError
    where the model cannot be served; both in one sentence. All methods may be called from any thread, also where
    an event loop runs; a call that is interrupted or left drops what it had under way.
    """

    launcher = MODULE
    """The module that starts all of Toka; measurements have another one."""

    def __init__(self, model: str | Path | None = None, *, progress: bool = False, **settings: Any) -> None:
        config = _config(model, progress, settings)
        display = Bars() if progress and sys.stderr.isatty() else Quiet()
        self._background = Background(config, display, self.launcher)
        self._names = itertools.count()
        # At the program's end, too.
        self._finalizer = weakref.finalize(self, self._background.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End Toka's processes. Calls under way, and later ones, raise RuntimeError."""
        self._finalizer()

    # --- Generation

    def generate(self, prompts: Any, params: Params = None, *, errors: Errors = "raise") -> list[Output]:
        """An Output for each of `prompts`, in their order: a text, the ids of one prompt, or a sequence of either.

        `params` are for all prompts, or one for each. Where some prompts cannot be answered, GenerationError (a
        ValueError) is raised once all others have been, with all outputs in `.outputs`; with `errors="return"`
        the outputs are returned, those of such prompts with `error` and without samples.
        """
        return self._all(COMPLETIONS, _completions(prompts, params), errors)

    def chat(self, messages: Any, params: Params = None, *, errors: Errors = "raise", **fields: Any) -> list[Output]:
        """The same for chats: the messages of one, or a sequence of such lists.

        `fields` are those that only a chat has: tools, tool_choice, chat_template_kwargs, ...
        """
        return self._all(CHAT, _chats(messages, params, fields), errors)

    def iter_generate(self, prompts: Any, params: Params = None) -> Generator[Output, None, None]:
        """As `generate`, but an Output as soon as it is there; its `index` says which prompt it is of.

        Prompts may come from an iterator without end: they are drawn as there is room for them. One that cannot be
        answered is an Output with `error`.
        """
        return self._each(COMPLETIONS, _completions(prompts, params))

    def iter_chat(self, messages: Any, params: Params = None, **fields: Any) -> Generator[Output, None, None]:
        """As `iter_generate`, of chats."""
        return self._each(CHAT, _chats(messages, params, fields))

    def aiter_generate(self, prompts: Any, params: Params = None) -> AsyncGenerator[Output, None]:
        """As `iter_generate`, for `async for`."""
        return self._aeach(COMPLETIONS, _completions(prompts, params))

    def aiter_chat(self, messages: Any, params: Params = None, **fields: Any) -> AsyncGenerator[Output, None]:
        """As `iter_chat`, for `async for`."""
        return self._aeach(CHAT, _chats(messages, params, fields))

    def abort(self) -> None:
        """End all calls under way with what they have: samples come with finish_reason `abort`.

        Prompts whose turn had not come have samples without tokens in a list, and are left out by an iterator.
        """
        self._background.abort()

    # --- Text

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids that `generate` makes of a text."""
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        ids: list[int] = self._ask("/tokenize", body)["tokens"]
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._ask("/detokenize", {"tokens": ids})["prompt"])

    # --- There and back

    def _all(self, path: str, jobs: Iterable[Job], errors: Errors) -> list[Output]:
        if errors not in ("raise", "return"):
            raise ValueError(f"errors: expected 'raise' or 'return', got {errors!r}")
        jobs = list(jobs)
        found = {output.index: output for output in self._each(path, jobs)}
        outputs = [found.get(index) or _never(index, *job) for index, job in enumerate(jobs)]
        if errors == "raise" and any(each.error is not None for each in outputs):
            raise GenerationError(outputs)
        return outputs

    def _each(self, path: str, jobs: Iterable[Job]) -> Generator[Output, None, None]:
        done: SimpleQueue[Done | RuntimeError] = SimpleQueue()
        with self._run(path, jobs, done.put) as run:
            while run.refill():
                yield fill(*run.take(done.get()))

    async def _aeach(self, path: str, jobs: Iterable[Job]) -> AsyncGenerator[Output, None]:
        done: asyncio.Queue[Done | RuntimeError] = asyncio.Queue()
        with self._run(path, jobs, putting(asyncio.get_running_loop(), done)) as run:
            while run.refill():
                yield fill(*run.take(await done.get()))

    def _run(self, path: str, jobs: Iterable[Job], put: Put) -> Run:
        """`put` gets (Output, answer) for each job."""
        name = f"offline-{next(self._names)}"
        requests = (
            Request(Output(index, prompt), path, _encode({"request_id": name, **body}), params.n)
            for index, (prompt, params, body) in enumerate(jobs)
        )
        return Run(self._background, name, requests, put)

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        done: SimpleQueue[Done | RuntimeError] = SimpleQueue()
        with Run(self._background, path, iter([Request(Output(0, None), path, _encode(body), 1)]), done.put) as run:
            run.refill()
            _, answer = run.take(done.get())
        if isinstance(answer, Exception):
            raise answer
        if answer.status != 200:
            raise ValueError(error_of(answer))
        return msgspec.json.decode(answer.body)


def _config(model: str | Path | None, progress: bool, given: dict[str, Any]) -> settings.Config:
    for name in OWN:
        if name in given:
            raise ValueError(f"{name}: toka.LLM has a server of its own, which nobody else reaches")
    lines = progress and not sys.stderr.isatty()
    values = {"log_level": "info" if lines else "warning"} | given | ({} if model is None else {"model": model})
    return settings.load([f"{name}={value}" for name, value in values.items()])


def _completions(prompts: Any, params: Params) -> Iterator[Job]:
    ids = getattr(prompts, "ndim", 0) == 1
    if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], numbers.Integral):
        ids = True
    several = [prompts] if ids or isinstance(prompts, str) else prompts
    return ((prompt, each, each.completion(prompt)) for prompt, each in _paired(several, params))


def _chats(messages: Any, params: Params, fields: Mapping[str, Any]) -> Iterator[Job]:
    one = isinstance(messages, Sequence) and messages and isinstance(messages[0], Mapping)
    several = [messages] if one else messages
    return ((chat, each, each.chat(chat, fields)) for chat, each in _paired(several, params))


def _paired(prompts: Iterable[Any], params: Params) -> Iterator[tuple[Any, SamplingParams]]:
    """Each prompt with its parameters; ValueError where there are more or fewer of these."""
    if params is None or isinstance(params, SamplingParams):
        own = params or SamplingParams()
        return ((prompt, own) for prompt in prompts)
    return _zipped(prompts, params)


def _zipped(prompts: Iterable[Any], params: Iterable[SamplingParams]) -> Iterator[tuple[Any, SamplingParams]]:
    missing = object()
    for prompt, each in itertools.zip_longest(prompts, params, fillvalue=missing):
        if prompt is missing or not isinstance(each, SamplingParams):
            raise ValueError("params: expected SamplingParams, or as many of them as there are prompts")
        yield prompt, each


def _encode(body: Mapping[str, Any]) -> bytes | Exception:
    """The body as JSON, or the ValueError that names the field which cannot be. Arrays and tensors become lists."""
    try:
        return msgspec.json.encode(body, enc_hook=_plain)
    except UNSENDABLE as error:
        wrong = ValueError(f"the request is not JSON: {error}")
    for name, value in body.items():
        try:
            msgspec.json.encode(value, enc_hook=_plain)
        except UNSENDABLE as error:
            return ValueError(f"{name}: {error}")
    return wrong


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _never(index: int, prompt: Any, params: SamplingParams, _: Mapping[str, Any]) -> Output:
    """Of a prompt that was not sent, since its call was aborted."""
    return Output(index, prompt, outputs=[Choice("", [], "abort") for _ in range(params.n)])
