"""A parsed request to what is submitted: prompts as ids, and how to sample from each.

Checks what depends on the model, the configuration or on several fields; raises ApiError that names one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from frontend import chats
from frontend.errors import ApiError, wrong
from frontend.generation import WHOLE_DELIVERY, Call, Generation
from frontend.grammars import Grammar, Grammars, Thoughts, check_ends
from frontend.sample import Sample
from frontend.schema import ChatRequest, CompletionRequest, Sampling
from frontend.scores import PromptScores
from frontend.structure import ToolUse, chat_grammar, text_grammar, thoughts, tool_use
from frontend.tool_formats import of_template
from frontend.tools import toolbox
from toka.messages import ModelCard, SamplingParams
from toka.text.detokenize import detokenizer
from toka.text.reasoning import ThinkSplitter, begins_inside, thinks
from toka.text.tokenize import TokenizerPool
from toka.text.vocabulary import Vocabulary

SEED_BITS = 64
PROMPTS_AT_ONCE = 64
"""Prompts looked at before other tasks of the event loop get their turn."""
MOST_SCORES = 1 << 20
"""Log-probabilities of prompts in one answer: 30 to 50 MB of it."""
DEFAULT_MAX_TOKENS = 16
"""Of completions, as OpenAI's; a chat may go on to the end of the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the configuration allows."""

    max_n: int
    max_samples: int
    max_logprobs: int
    client_chat_template: bool


@dataclass(slots=True, kw_only=True)
class Job:
    """A request that may run."""

    prompts: list[NDArray[np.int32]]
    echoes: list[str]
    """What stands before the text of each prompt's choices."""
    params: SamplingParams
    max_tokens: list[int]
    """Of each prompt."""
    seed: int | None
    n: int
    stops: list[str]
    priority: int
    stream: bool
    include_usage: bool
    request_id: str | None
    """As the client calls it."""
    token_ids: bool
    """Whether the answer has the ids of prompts and choices."""
    inside: bool | None = None
    """For models that think: whether the prompt ends within what they think."""
    tools: ToolUse | None = None
    """Where the answer may call tools."""

    def call(self, vocabulary: Vocabulary) -> Call:
        call = Call(self.stream)
        # A stop string is looked for in each token's text as it comes.
        delivery = 1 if self.stream or self.stops else WHOLE_DELIVERY
        for place, (prompt, most) in enumerate(zip(self.prompts, self.max_tokens)):
            seed = secrets.randbits(SEED_BITS) if self.seed is None else self.seed
            samples = [self._sample(number, place * self.n + number, vocabulary) for number in range(self.n)]
            params = dataclasses.replace(self.params, max_tokens=most, seed=seed)
            likely = self.params.prompt_logprobs
            Generation(
                prompt=prompt,
                params=params,
                samples=samples,
                priority=self.priority,
                delivery=delivery,
                call=call,
                scores=PromptScores(len(prompt) - 1, likely) if self.scored else None,
            )
        return call

    @property
    def scored(self) -> bool:
        """Whether the prompts' log-probabilities are asked for."""
        return self.params.prompt_logprobs >= 0

    def place(self, sample: Sample) -> int:
        """The number of the sample's prompt."""
        return sample.index // self.n

    def prompt(self, sample: Sample) -> NDArray[np.int32]:
        return self.prompts[self.place(sample)]

    def echo(self, sample: Sample) -> str:
        return self.echoes[self.place(sample)]

    def _sample(self, number: int, index: int, vocabulary: Vocabulary) -> Sample:
        text = detokenizer(vocabulary, None if self.tools is None else self.tools.skipped)
        with_logprobs, with_ids = self.params.logprobs >= 0, self.token_ids
        think = None if self.inside is None else ThinkSplitter(self.inside)
        calls = None if self.tools is None else self.tools.reader()
        return Sample(number, index, text, self.stops, with_logprobs, with_ids=with_ids, think=think, calls=calls)


class Planner:
    """Makes Jobs of requests to one model."""

    def __init__(self, pool: TokenizerPool, vocabulary: Vocabulary, limits: Limits) -> None:
        self._pool = pool
        self._limits = limits
        self._vocabulary, self._grammars = vocabulary, Grammars(vocabulary)
        self._longest_token = vocabulary.longest()

    async def completion(self, request: CompletionRequest, card: ModelCard) -> Job:
        self._check(request, card)
        echo = bool(request.echo)
        if request.best_of not in (None, request.n or 1):
            message = "all samples that are drawn are returned, so only the value of n is supported"
            raise wrong("best_of", message, "unsupported_parameter")
        if request.suffix is not None:
            message = "text is generated behind a prompt, not between it and a suffix"
            raise wrong("suffix", message, "unsupported_parameter")
        if request.max_tokens == 0 and not echo:
            raise wrong("max_tokens", "0 is for echo alone")
        logprobs = -1 if request.logprobs is None else request.logprobs
        self._check_logprobs("logprobs", logprobs, card)
        given = _prompts(request)
        self._check_samples("prompt", len(given), request.n)
        grammar = text_grammar(request)
        prompts, echoes = await self._encode(request, given, card, echo)
        job = self._job(request, card, "prompt", prompts, echoes, request.max_tokens, DEFAULT_MAX_TOKENS, logprobs)
        if echo and logprobs >= 0:
            values = sum(map(len, prompts)) * job.n * (logprobs + 1)
            if values > MOST_SCORES:
                raise wrong(
                    "logprobs", f"{values} log-probabilities of prompts, choice by choice; at most {MOST_SCORES}"
                )
            job.params = dataclasses.replace(job.params, prompt_logprobs=logprobs)
        await self._hold(job, request, grammar, Thoughts.NONE)
        return job

    async def chat(self, request: ChatRequest, card: ModelCard) -> Job:
        self._check(request, card)
        chats.check(request)
        most = chats.max_tokens(request)
        logprobs = (request.top_logprobs or 0) if request.logprobs else -1
        self._check_logprobs("top_logprobs", logprobs, card)
        self._check_samples("n", 1, request.n)
        self._check_length("messages", sum(map(chats.characters, request.messages)), card)
        source = request.chat_template or (self._pool.template and self._pool.template.source) or ""
        box, form = toolbox(request), of_template(source)
        grammar = chat_grammar(request, box, form, self._vocabulary)
        chat = await chats.chat(request, self._limits.client_chat_template, box, form)
        try:
            text = await self._pool.render_chat(chat.messages, chat.rendering, chat.template)
        except ValueError as error:
            raise wrong("messages" if chat.template is None else "chat_template", str(error)) from None
        self._check_length("messages", len(text), card)
        prompts = await self._pool.encode([text], False)
        job = self._job(request, card, "messages", prompts, [""], most, card.context_length, logprobs)
        job.inside = begins_inside(text, chat.begun) if thinks(source) else None
        await self._hold(job, request, grammar, thoughts(job.inside, text, chat.begun))
        if box is not None:
            early, at_start = job.stream or grammar is not None, not chat.begun.strip()
            job.tools = tool_use(box, form, self._vocabulary, early=early, at_start=at_start)
        return job

    async def close(self) -> None:
        await self._grammars.close()

    async def _hold(self, job: Job, request: Sampling, grammar: Grammar | None, before: Thoughts) -> None:
        """Hold the answers to `grammar`, behind what the model may think `before`."""
        if grammar is None:
            return
        check_ends(request)
        constraint = await self._grammars.constraint(grammar, before)
        job.params = dataclasses.replace(job.params, grammar=constraint.grammar, grammar_after=constraint.after)

    async def _encode(
        self, request: CompletionRequest, given: Sequence[str | list[int]], card: ModelCard, echo: bool
    ) -> tuple[list[NDArray[np.int32]], list[str]]:
        """The ids of each prompt, and the text to echo."""
        texts = [each for each in given if isinstance(each, str)]
        for text in texts:
            self._check_length("prompt", len(text), card)
        encoded = iter(await self._pool.encode(texts, request.add_special_tokens is not False))
        prompts, echoes = [], []
        for each in given:
            if isinstance(each, str):
                prompts.append(next(encoded))
                echoes.append(each if echo else "")
            else:
                prompts.append(_ids(each, card))
                echoes.append(await self._pool.decode(each) if echo else "")
            if len(prompts) % PROMPTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return prompts, echoes

    def _job(
        self,
        request: Sampling,
        card: ModelCard,
        field: str,
        prompts: list[NDArray[np.int32]],
        echoes: list[str],
        most: int | None,
        default: int,
        logprobs: int,
    ) -> Job:
        max_tokens = [_room(field, len(prompt), most, default, card) for prompt in prompts]
        if (request.min_tokens or 0) > min(max_tokens):
            raise wrong("min_tokens", f"{request.min_tokens} is more than the {min(max_tokens)} tokens there may be")
        stop = request.stop or []
        return Job(
            prompts=prompts,
            echoes=echoes,
            params=_params(request, logprobs),
            max_tokens=max_tokens,
            seed=None if request.seed is None else request.seed % (1 << SEED_BITS),
            n=request.n or 1,
            stops=[stop] if isinstance(stop, str) else stop,
            priority=request.priority or 0,
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            request_id=request.request_id,
            token_ids=bool(request.return_token_ids),
        )

    def _check(self, request: Sampling, card: ModelCard) -> None:
        if request.stream_options is not None and not request.stream:
            raise wrong("stream_options", "needs stream to be true")
        if request.n is not None and request.n > self._limits.max_n:
            raise wrong("n", f"at most {self._limits.max_n}, got {request.n}")
        for field, ids in (("logit_bias", request.logit_bias), ("stop_token_ids", request.stop_token_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < card.vocab_size:
                raise wrong(field, f"token ids are from 0 to {card.vocab_size - 1}")

    def _check_logprobs(self, field: str, logprobs: int, card: ModelCard) -> None:
        most = min(self._limits.max_logprobs, card.max_logprobs)
        if logprobs > most:
            raise wrong(field, f"at most {most}, got {logprobs}")

    def _check_samples(self, field: str, prompts: int, n: int | None) -> None:
        samples = prompts * (n or 1)
        if samples > self._limits.max_samples:
            raise wrong(field, f"{samples} samples in one request; at most {self._limits.max_samples}")

    def _check_length(self, field: str, characters: int, card: ModelCard) -> None:
        """Refuse what cannot fit before it is tokenized: a token stands for so many bytes at most."""
        at_least = characters // self._longest_token
        if at_least > card.context_length:
            raise _too_long(field, f"at least {at_least}", card)


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts, each a text or ids, none empty."""
    prompt = request.prompt
    if not prompt:
        raise wrong("prompt", "must not be empty")
    if isinstance(prompt, str):
        return [prompt]
    ids = [each for each in prompt if isinstance(each, int)]
    if len(ids) == len(prompt):
        return [ids]
    prompts = [each for each in prompt if not isinstance(each, int)]
    if ids or len({type(each) for each in prompts}) > 1:
        raise wrong("prompt", "texts, ids and lists of ids cannot be mixed")
    if not all(prompts):
        raise wrong("prompt", "no prompt may be empty")
    return prompts


def _ids(prompt: Sequence[int], card: ModelCard) -> NDArray[np.int32]:
    if len(prompt) > card.context_length:
        raise _too_long("prompt", str(len(prompt)), card)
    try:
        ids = np.array(prompt, dtype=np.int64)
    except OverflowError:
        ids = np.array([-1])
    if ids.min() < 0 or ids.max() >= card.vocab_size:
        raise wrong("prompt", f"token ids are from 0 to {card.vocab_size - 1}")
    return ids.astype(np.int32)


def _room(field: str, prompt: int, most: int | None, default: int, card: ModelCard) -> int:
    """Tokens that may be generated after `prompt` tokens; ApiError where they do not fit."""
    if not prompt:
        raise wrong(field, "has no tokens")
    if prompt + (most != 0) > card.context_length:
        raise _too_long(field, str(prompt), card)
    if prompt + (most != 0) > card.kv_cache_tokens:
        raise wrong(field, f"{prompt} tokens can never fit the KV cache, which holds {card.kv_cache_tokens}")
    if most is None:
        return min(default, card.context_length - prompt, card.kv_cache_tokens - prompt)
    if prompt + most > card.context_length:
        message = f"{prompt} tokens of prompt and {most} to generate, but the context is {card.context_length}"
        raise wrong("max_tokens", message, "context_length_exceeded")
    if prompt + most > card.kv_cache_tokens:
        held = f"the KV cache holds {card.kv_cache_tokens}"
        raise wrong("max_tokens", f"{prompt} tokens of prompt and {most} to generate, but {held}")
    return most


def _too_long(field: str, tokens: str, card: ModelCard) -> ApiError:
    message = f"{tokens} tokens of prompt, but the context is {card.context_length} tokens, output included"
    return wrong(field, message, "context_length_exceeded")


def _params(request: Sampling, logprobs: int) -> SamplingParams:
    """max_tokens and seed are each prompt's own, set later."""
    values = {
        name: getattr(request, name)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
            "min_tokens",
            "ignore_eos",
        )
    }
    return SamplingParams(
        max_tokens=0,
        top_k=max(0, request.top_k or 0),
        stop_token_ids=sorted(set(request.stop_token_ids or [])),
        logprobs=logprobs,
        **{name: value for name, value in values.items() if value is not None},
    )
