"""The answer to `/v1/responses`: a Response, or the events of its making."""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Any

from frontend.answers import Answer
from frontend.errors import ApiError
from frontend.generation import Call
from frontend.jobs import Job
from frontend.logprobs import chat_logprobs
from frontend.response_events import Event, Logprobs, Output
from frontend.response_schema import ResponseRequest
from frontend.responses import tools_of
from frontend.sample import Piece, Sample
from frontend.service import Model
from toka.messages import Finish
from toka.text.reasoning import CLOSE

_STATUS = {
    Finish.NONE: "in_progress",
    Finish.STOP: "completed",
    Finish.LENGTH: "incomplete",
    Finish.ABORT: "cancelled",
}
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


def echo(request: ResponseRequest) -> dict[str, Any]:
    """What a Response repeats of its request, as it was understood."""
    form = request.text.format if request.text is not None else None
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": tools_of(request),
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
        "user": request.user,
    }


class ResponseAnswer(Answer):
    prefix = "resp_"
    named = True
    end = b""

    def __init__(self, echoed: dict[str, Any], job: Job, call: Call, model: Model) -> None:
        super().__init__(job, call, model)
        (self._sample,) = self._samples
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
            "temperature": job.params.temperature,
            "top_p": job.params.top_p,
        } | echoed
        self._output, self._ids = Output(), list[int]()
        self._characters = 0
        """Of the text that was given out."""
        self._logprobs: Logprobs = []
        self._offsets: list[int] = []
        """Of tokens that may be the text's."""
        self._sent = 0
        """Events."""

    def whole(self) -> dict[str, Any]:
        self._read()
        return self._response(self._sample.finish)

    def first_chunks(self) -> list[Event]:
        begun = self._response(Finish.NONE)
        return self._numbered([{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")])

    def chunks(self, sample: Sample) -> list[Event]:
        return self._numbered(self._read())

    def last_chunks(self) -> list[Event]:
        finish = self._sample.finish
        kind = "completed" if finish == Finish.STOP else "incomplete"
        return self._numbered([{"type": f"response.{kind}", "response": self._response(finish)}])

    def failure(self, error: ApiError) -> Event:
        said = {"code": _CODES.get(error.status, "server_error"), "message": error.message}
        failed = self._response(Finish.NONE) | {"status": "failed", "error": said}
        (event,) = self._numbered([{"type": "response.failed", "response": failed}])
        return event

    def _numbered(self, events: list[Event]) -> list[Event]:
        first, self._sent = self._sent, self._sent + len(events)
        return [event | {"sequence_number": first + place} for place, event in enumerate(events)]

    def _read(self) -> list[Event]:
        """Take what is new of the sample."""
        piece, finish = self._sample.take(), self._sample.finish
        self._ids += piece.ids
        self._characters += len(piece.text)
        events = self._output.add(piece, self._text_logprobs(piece))
        if finish:
            left = [] if self._output.called else self._logprobs
            events += self._output.end("completed" if finish == Finish.STOP else "incomplete", left)
        return events

    def _text_logprobs(self, piece: Piece) -> Logprobs:
        """Those of the tokens that begin within the text up to the end of `piece`: not of thoughts, nor of calls."""
        if self._job.params.logprobs < 0 or self._output.called:
            return []
        self._logprobs += chat_logprobs(piece, self._vocabulary)["content"]
        self._offsets += piece.offsets
        start = self._sample.answer_at
        if start is None or not piece.text:
            return []
        first, last = (bisect_left(self._offsets, place) for place in (start, start + self._characters))
        found = self._logprobs[first:last]
        del self._logprobs[:last], self._offsets[:last]
        return found

    def _response(self, finish: Finish) -> dict[str, Any]:
        """The Response as it stands, ended or not."""
        completed, cut = finish == Finish.STOP, finish == Finish.LENGTH
        ended = self._usage() | self._tokens() if finish else {"usage": None}
        return self._head | {
            "status": _STATUS[finish],
            "completed_at": int(time.time()) if completed else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": list(self._output.items),
        } | ended  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        (generation,) = self._call.generations
        prompt, completion = len(generation.prompt), self._sample.count
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": generation.cached, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self._thoughts()},
            "total_tokens": prompt + completion,
        }
        return {"usage": usage}

    def _tokens(self) -> dict[str, Any]:
        """The ids of prompt and answer, where they are asked for."""
        if not self._job.token_ids:
            return {}
        return {"prompt_token_ids": self._job.prompt(self._sample).tolist(), "token_ids": self._ids}

    def _thoughts(self) -> int:
        """Tokens up to the one that ends the think block; of a model without such a token, none."""
        if not any(item["type"] == "reasoning" for item in self._output.items):
            return 0
        ids, close = self._sample.ids[: self._sample.count], self._vocabulary.token(CLOSE)
        if close in ids:
            return ids.index(close) + 1
        return len(ids) if self._sample.answer_at is None else 0
