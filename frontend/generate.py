"""Runs a call and sends its answer, whole or as a stream."""

from __future__ import annotations

import contextlib
import logging

import msgspec
from aiohttp import web

from frontend.answers import Answer, ChatAnswer, CompletionAnswer
from frontend.errors import ApiError
from frontend.generation import Call
from frontend.jobs import Job
from frontend.parse import parse
from frontend.schema import ChatRequest, CompletionRequest
from frontend.service import Service
from frontend.stream import DONE, EventStream
from toka.messages import Finish

log = logging.getLogger(__name__)


class GenerationRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionAnswer)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatAnswer)

    async def _answer(self, request: web.Request, kind: type[Answer]) -> web.StreamResponse:
        service = self._service
        with service.serving():
            body = await service.bodies.read(request)
            size = len(body)
            try:
                job = await self._job(body, kind)
                del body
                call = job.call(service.model.vocabulary)
                answer = kind(job, call, service.model)
                return await self._run(request, job, call, answer)
            finally:
                service.bodies.forget(size)

    async def _job(self, body: bytearray, kind: type[Answer]) -> Job:
        service = self._service
        model = service.model
        if kind is ChatAnswer:
            chat = await parse(body, ChatRequest)
            service.check_name(chat.model)
            return await model.planner.chat(chat, service.card)
        completion = await parse(body, CompletionRequest, service.config.max_samples)
        service.check_name(completion.model)
        return await model.planner.completion(completion, service.card)

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
    stream = EventStream(service.config.ping_seconds, call.nudge)
    # A client that is gone: there is nobody left to tell, and the call is closed.
    with contextlib.suppress(ConnectionError):
        await stream.open(request)
        try:
            await _events(stream, call, answer)
        except ApiError as error:
            await stream.send([error.body])
        except ConnectionError:
            raise
        except Exception:
            log.exception("a stream failed")
            await stream.send([ApiError(500, "internal error").body])
        finally:
            stream.stop()
        return await stream.close()
    return stream.response


async def _events(stream: EventStream, call: Call, answer: Answer) -> None:
    while not call.done:
        changed = await call.wait()
        await answer.prepare(changed)
        await stream.send([chunk for sample in changed for chunk in answer.chunks(sample)])
        await stream.ping()
    await stream.send(answer.last_chunks(), DONE)
