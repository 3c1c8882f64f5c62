"""Every operation of the server, declared once: how it is registered, and what /openapi.json says of it."""

from __future__ import annotations

from frontend import answer_schema as answers
from frontend.abort import AbortRequest, AbortRoute
from frontend.batches import BatchQuery, BatchRequest, BatchRoutes
from frontend.docs import DocsRoutes
from frontend.files import FileForm, FileQuery, FileRoutes
from frontend.generate import GenerationRoutes
from frontend.openapi import Route
from frontend.records import Batch, File
from frontend.schema import ChatRequest, CompletionRequest
from frontend.service import Service
from frontend.status import StatusRoutes
from frontend.tokenization import DetokenizeRequest, TokenizationRoutes, TokenizeRequest

BODY = (400, 413, 429)
"""What any route with a body may answer."""
KEPT = (404, 501)
"""No such object; the server keeps no files."""
LATER = (503,)
"""Nothing serves yet, or no longer."""


def routes(service: Service) -> list[Route]:
    """Of one server, in the order of the documentation."""
    declared = [*_generating(service), *_tokenizing(service), *_files(service), *_batches(service), *_status(service)]
    docs, about = DocsRoutes(declared), "Documentation"
    declared += [
        Route(
            method="GET",
            path="/openapi.json",
            handler=docs.document,
            tag=about,
            summary="This document.",
            answer=answers.Document,
        ),
        Route(method="GET", path="/docs", handler=docs.page, tag=about, summary="It as a page.", media="text/html"),
    ]
    return declared


def _generating(service: Service) -> list[Route]:
    generation, tag = GenerationRoutes(service), "Generation"
    return [
        Route(
            method="POST",
            path="/v1/chat/completions",
            handler=generation.chat,
            tag=tag,
            summary="Answer a conversation.",
            body=ChatRequest,
            answer=answers.ChatCompletion,
            events=answers.ChatCompletionChunk,
            errors=(*BODY, 404, *LATER),
            example={"messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 16},
        ),
        Route(
            method="POST",
            path="/v1/completions",
            handler=generation.completions,
            tag=tag,
            summary="Go on with a text.",
            body=CompletionRequest,
            answer=answers.Completion,
            events=answers.CompletionChunk,
            errors=(*BODY, 404, *LATER),
            example={"prompt": "Once upon a time", "max_tokens": 16},
        ),
        Route(
            method="POST",
            path="/v1/abort",
            handler=AbortRoute(service).abort,
            tag=tag,
            summary="End requests with what they have.",
            body=AbortRequest,
            answer=answers.Aborted,
            errors=(*BODY, 404),
            example={"all": True},
        ),
    ]


def _tokenizing(service: Service) -> list[Route]:
    tokenization, tag = TokenizationRoutes(service), "Tokens"
    return [
        Route(
            method="POST",
            path="/tokenize",
            handler=tokenization.tokenize,
            tag=tag,
            summary="Text to token ids.",
            body=TokenizeRequest,
            answer=answers.Tokens,
            errors=(*BODY, 404, *LATER),
            example={"prompt": "Hello there"},
        ),
        Route(
            method="POST",
            path="/detokenize",
            handler=tokenization.detokenize,
            tag=tag,
            summary="Token ids to text.",
            body=DetokenizeRequest,
            answer=answers.Texts,
            errors=(*BODY, 404, *LATER),
            example={"tokens": [40, 71, 68]},
        ),
        Route(
            method="GET",
            path="/tokenizer_info",
            handler=tokenization.info,
            tag=tag,
            summary="The special tokens and the chat template.",
            answer=answers.TokenizerInfo,
            errors=LATER,
        ),
    ]


def _files(service: Service) -> list[Route]:
    files, tag = FileRoutes(service), "Files"
    return [
        Route(
            method="POST",
            path="/v1/files",
            handler=files.create,
            tag=tag,
            summary="Upload the input of a batch.",
            form=FileForm,
            answer=File,
            errors=(400, 413, 501),
        ),
        Route(
            method="GET",
            path="/v1/files",
            handler=files.list,
            tag=tag,
            summary="All files, the newest first.",
            query=FileQuery,
            answer=answers.FileList,
            errors=(400, 501),
        ),
        Route(
            method="GET",
            path="/v1/files/{file}",
            handler=files.retrieve,
            tag=tag,
            summary="What is known of a file.",
            answer=File,
            errors=KEPT,
        ),
        Route(
            method="DELETE",
            path="/v1/files/{file}",
            handler=files.delete,
            tag=tag,
            summary="Delete a file.",
            answer=answers.FileDeleted,
            errors=(*KEPT, 409),
        ),
        Route(
            method="GET",
            path="/v1/files/{file}/content",
            handler=files.content,
            tag=tag,
            summary="What a file holds.",
            media="application/jsonl",
            errors=KEPT,
        ),
    ]


def _batches(service: Service) -> list[Route]:
    batches, tag = BatchRoutes(service), "Batches"
    return [
        Route(
            method="POST",
            path="/v1/batches",
            handler=batches.create,
            tag=tag,
            summary="Run the requests of a file.",
            body=BatchRequest,
            answer=Batch,
            errors=(400, 413, 501),
            example={"input_file_id": "file-", "endpoint": "/v1/completions", "completion_window": "24h"},
        ),
        Route(
            method="GET",
            path="/v1/batches",
            handler=batches.list,
            tag=tag,
            summary="All batches, the newest first.",
            query=BatchQuery,
            answer=answers.BatchList,
            errors=(400, 501),
        ),
        Route(
            method="GET",
            path="/v1/batches/{batch}",
            handler=batches.retrieve,
            tag=tag,
            summary="How far a batch is.",
            answer=Batch,
            errors=KEPT,
        ),
        Route(
            method="POST",
            path="/v1/batches/{batch}/cancel",
            handler=batches.cancel,
            tag=tag,
            summary="Cancel a batch; what is done is kept.",
            answer=Batch,
            errors=(*KEPT, 409),
        ),
    ]


def _status(service: Service) -> list[Route]:
    status, tag = StatusRoutes(service), "Server"
    return [
        Route(
            method="GET",
            path="/v1/models",
            handler=status.models,
            tag=tag,
            summary="The model that is served.",
            answer=answers.ModelList,
            errors=LATER,
        ),
        Route(
            method="GET",
            path="/v1/models/{name:.+}",
            handler=status.model,
            tag=tag,
            summary="One model.",
            answer=answers.Model,
            errors=(404, *LATER),
        ),
        Route(
            method="GET",
            path="/health",
            handler=status.health,
            tag=tag,
            summary="Asks a replica, whose scheduling loop answers.",
            answer=answers.Health,
            errors=LATER,
            unavailable=answers.Unavailable,
        ),
        Route(
            method="GET",
            path="/ready",
            handler=status.ready,
            tag=tag,
            summary="Whether a new request would run; asks nobody.",
            answer=answers.Ready,
            errors=LATER,
            unavailable=answers.Unavailable,
        ),
    ]
