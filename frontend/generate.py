"""Runs a call and sends its answer, whole or as a stream."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from frontend import responses
from frontend.answers import Answer, ChatAnswer, CompletionAnswer
from frontend.errors import ApiError
from frontend.generation import Call
from frontend.jobs import Job
from frontend.parse import parse
from frontend.response_answers import ResponseAnswer, echo
from frontend.response_schema import ResponseRequest
from frontend.schema import ChatRequest, CompletionRequest, Sampling
from frontend.service import Model, Service
from frontend.stream import EventStream
from toka.messages import Finish

log = logging.getLogger(__name__)

Answering = Callable[[Job, Call, Model], Answer]
Plan = Callable[[bytearray], Awaitable[tuple[Job, Answering]]]
S = TypeVar("S", bound=Sampling)


class GenerationRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._completion)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._chat)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._response)

    async def _answer(self, request: web.Request, plan: Plan) -> web.StreamResponse:
        service = self._service
        with service.serving():
            body = await service.bodies.read(request)
            size = len(body)
            try:
                job, answering = await plan(body)
                del body
                call = job.call(service.model.vocabulary)
                return await self._run(request, job, call, answering(job, call, service.model))
            finally:
                service.bodies.forget(size)

    async def _completion(self, body: bytearray) -> tuple[Job, Answering]:
        service = self._service
        asked = await self._asked(body, CompletionRequest, service.config.max_samples)
        return await service.model.planner.completion(asked, service.card), CompletionAnswer

    async def _chat(self, body: bytearray) -> tuple[Job, Answering]:
        service = self._service
        asked = await self._asked(body, ChatRequest)
        return await service.model.planner.chat(asked, service.card), ChatAnswer

    async def _response(self, body: bytearray) -> tuple[Job, Answering]:
        service = self._service
        asked = await self._asked(body, ResponseRequest)
        job = await responses.plan(asked, service.model.planner, service.card)
        return job, partial(ResponseAnswer, echo(asked))

    async def _asked(self, body: bytearray, kind: type[S], most_prompts: int = sys.maxsize) -> S:
        asked = await parse(body, kind, most_prompts)
        self._service.check_name(asked.model)
        return asked

    async def _run(self, request: web.Request, job: Job, call: Call, answer: Answer) -> web.StreamResponse:
        service = self._service
        service.calls[call] = answer.id
        try:
            if any(job.max_tokens) or job.scored:
                await service.engine.submit(call)
                await call.wait_accepted()
            else:
                call.end(Finish.LENGTH)
            return await (_stream(request, call, answer, service) if job.stream else _whole(call, answer))
        finally:
            service.engine.close(call)
            del service.calls[call]


async def _whole(call: Call, answer: Answer) -> web.StreamResponse:
    while call.left:
        await call.wait()
    await answer.prepare()
    return web.Response(body=msgspec.json.encode(answer.whole()), content_type="application/json")


async def _stream(request: web.Request, call: Call, answer: Answer, service: Service) -> web.StreamResponse:
    stream = EventStream(service.config.ping_seconds, call.nudge, named=answer.named)
    # A client that is gone: there is nobody left to tell, and the call is closed.
    with contextlib.suppress(ConnectionError):
        await stream.open(request)
        try:
            await _events(stream, call, answer)
        except ApiError as error:
            await stream.send([answer.failure(error)])
        except ConnectionError:
            raise
        except Exception:
            log.exception("a stream failed")
            await stream.send([answer.failure(ApiError(500, "internal error"))])
        finally:
            stream.stop()
        return await stream.close()
    return stream.response


async def _events(stream: EventStream, call: Call, answer: Answer) -> None:
    await stream.send(answer.first_chunks())
    while not call.done:
        changed = await call.wait()
        await answer.prepare(changed)
        await stream.send([chunk for sample in changed for chunk in answer.chunks(sample)])
        await stream.ping()
    await stream.send(answer.last_chunks(), answer.end)
