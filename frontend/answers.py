"""What OpenAI's clients expect in answer: one object, or the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from frontend.generation import Call
from frontend.jobs import Job
from frontend.logprobs import PromptLogprobs, chat_logprobs, completion_logprobs, prompt_logprobs
from frontend.sample import Piece, Sample
from frontend.service import Model
from frontend.tool_calls import CallDelta
from toka.messages import Finish

_REASONS = {Finish.NONE: None, Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort"}


class Answer:
    """The answer to one call. Subclasses say what is a route's own."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, job: Job, call: Call, model: Model) -> None:
        self._job, self._call, self._vocabulary = job, call, model.vocabulary
        self.id = job.request_id or f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }
        self._chunk_head = self._head | {"object": self.chunk_object}
        if job.include_usage:
            self._chunk_head["usage"] = None
        self._begun: set[int] = set()

    async def prepare(self, samples: Sequence[Sample] | None = None) -> None:
        """Make ready what takes long of `chunks` for these samples, or of `whole`; to be called before."""

    @property
    def _samples(self) -> list[Sample]:
        return [sample for each in self._call.generations for sample in each.samples]

    def whole(self) -> dict[str, Any]:
        """All of a finished call, choices in order."""
        choices = [self._choice(sample, sample.take()) for sample in self._samples]
        return self._head | {"object": self.whole_object, "choices": choices, "usage": self._usage()}

    def chunks(self, sample: Sample) -> list[dict[str, Any]]:
        """What is new of a sample."""
        piece = sample.take()
        choices: list[dict[str, Any]] = []
        if sample.index not in self._begun and (piece or sample.finish):
            self._begun.add(sample.index)
            choices += self._opening(sample)
        if piece:
            choices += self._deltas(sample, piece)
        if sample.finish:
            choices.append(self._closing(sample))
        return [self._chunk_head | {"choices": [choice]} for choice in choices]

    def last_chunks(self) -> list[dict[str, Any]]:
        """After every sample has finished."""
        return [self._chunk_head | {"choices": [], "usage": self._usage()}] if self._job.include_usage else []

    def _usage(self) -> dict[str, Any]:
        generations = self._call.generations
        prompt = sum(len(each.prompt) for each in generations)
        completion = sum(sample.count for each in generations for sample in each.samples)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(each.cached for each in generations)},
        }

    def _prompt_ids(self, sample: Sample) -> dict[str, Any]:
        """`prompt_token_ids` of the sample's prompt, where they are asked for."""
        return {"prompt_token_ids": self._job.prompt(sample).tolist()} if self._job.token_ids else {}

    def _ids(self, piece: Piece | None) -> dict[str, Any]:
        """A choice's `token_ids`, where they are asked for."""
        return {"token_ids": piece.ids if piece is not None else []} if self._job.token_ids else {}

    def _choice(self, sample: Sample, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _opening(self, sample: Sample) -> Sequence[dict[str, Any]]:
        raise NotImplementedError

    def _deltas(self, sample: Sample, piece: Piece) -> Sequence[dict[str, Any]]:
        raise NotImplementedError

    def _closing(self, sample: Sample) -> dict[str, Any]:
        raise NotImplementedError


class CompletionAnswer(Answer):
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, job: Job, call: Call, model: Model) -> None:
        super().__init__(job, call, model)
        self._scored: dict[int, PromptLogprobs] = {}
        """By prompt."""

    async def prepare(self, samples: Sequence[Sample] | None = None) -> None:
        if not self._job.scored:
            return
        for sample in self._samples if samples is None else samples:
            place = self._job.place(sample)
            scores = self._call.generations[place].scores
            if place not in self._scored and scores is not None:
                about = self._job.prompt(sample).tolist(), self._echo(sample)
                self._scored[place] = await prompt_logprobs(scores, *about, self._vocabulary)

    def _choice(self, sample: Sample, piece: Piece) -> dict[str, Any]:
        choice = self._part(sample, self._echo(sample) + piece.text, piece) | self._prompt_ids(sample)
        if self._job.scored:
            choice["logprobs"] = self._scored[self._job.place(sample)].before(choice["logprobs"])
        return choice | {"finish_reason": _REASONS[sample.finish]}

    def _opening(self, sample: Sample) -> Sequence[dict[str, Any]]:
        echo = self._echo(sample)
        part = self._part(sample, echo, None) | self._prompt_ids(sample)
        if self._job.scored:
            part["logprobs"] = self._scored[self._job.place(sample)].before(None)
        return [part] if echo or self._job.token_ids or self._job.scored else []

    def _deltas(self, sample: Sample, piece: Piece) -> Sequence[dict[str, Any]]:
        return [self._part(sample, piece.text, piece)]

    def _closing(self, sample: Sample) -> dict[str, Any]:
        return self._part(sample, "", None) | {"finish_reason": _REASONS[sample.finish]}

    def _echo(self, sample: Sample) -> str:
        return self._job.echo(sample)

    def _part(self, sample: Sample, text: str, piece: Piece | None) -> dict[str, Any]:
        logprobs = None
        if piece is not None and self._job.params.logprobs >= 0:
            logprobs = completion_logprobs(piece, self._vocabulary, len(self._echo(sample)))
        part = {"index": sample.index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return part | self._ids(piece)


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        return super().whole() | self._prompt_ids(self._call.generations[0].samples[0])

    def chunks(self, sample: Sample) -> list[dict[str, Any]]:
        first = not self._begun
        chunks = super().chunks(sample)
        if first and chunks:
            chunks[0] |= self._prompt_ids(sample)
        return chunks

    def _choice(self, sample: Sample, piece: Piece) -> dict[str, Any]:
        calls = _whole_calls(piece.calls)
        content = None if calls and not piece.text else piece.text
        message = {"role": "assistant", "content": content, "refusal": None} | self._reasoning(piece)
        return {
            "index": sample.index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": self._logprobs(piece),
            "finish_reason": self._reason(sample),
        } | self._ids(piece)

    def _opening(self, sample: Sample) -> Sequence[dict[str, Any]]:
        content = "" if self._job.tools is None else None
        return [self._part(sample, {"role": "assistant", "content": content, "refusal": None}, None)]

    def _deltas(self, sample: Sample, piece: Piece) -> Sequence[dict[str, Any]]:
        """The first one has the ids and log-probabilities."""
        text = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        if piece.text:
            text["content"] = piece.text
        deltas: list[dict[str, Any]] = [text] if text else []
        deltas += [{"tool_calls": [_call_delta(each)]} for each in piece.calls]
        first, *others = deltas or [{"content": ""} if self._job.tools is None else {}]
        return [
            self._part(sample, first, piece) | {"logprobs": self._logprobs(piece)},
            *(self._part(sample, each, None) for each in others),
        ]

    def _closing(self, sample: Sample) -> dict[str, Any]:
        return self._part(sample, {}, None) | {"finish_reason": self._reason(sample)}

    def _reason(self, sample: Sample) -> str | None:
        """As OpenAI has it, a call that was asked for by name is an ordinary end."""
        tools = self._job.tools
        if tools is not None and not tools.box.named and sample.called and sample.finish == Finish.STOP:
            return "tool_calls"
        return _REASONS[sample.finish]

    def _reasoning(self, piece: Piece) -> dict[str, Any]:
        return {} if self._job.inside is None else {"reasoning_content": piece.reasoning or None}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        return chat_logprobs(piece, self._vocabulary) if self._job.params.logprobs >= 0 else None

    def _part(self, sample: Sample, delta: dict[str, Any], piece: Piece | None) -> dict[str, Any]:
        part = {"index": sample.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return part | self._ids(piece)


def _call_delta(delta: CallDelta) -> dict[str, Any]:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


def _whole_calls(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.name is not None:
            function = {"name": delta.name, "arguments": ""}
            calls.append({"id": delta.id, "type": "function", "function": function})
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return calls
