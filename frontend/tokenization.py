"""Text to ids and back, without the engine."""

from __future__ import annotations

from aiohttp import web
from msgspec import Struct

from frontend.answer_schema import Texts, TokenizerInfo, Tokens
from frontend.errors import wrong
from frontend.parse import parse
from frontend.schema import Count
from frontend.service import Service
from frontend.status import json_response


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | None = None
    """Give either this or texts."""
    texts: list[str] | None = None
    add_special_tokens: bool | None = None
    """Whether texts begin with the tokenizer's special tokens; they do where it is left out."""


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[Count | list[Count]]
    """The ids of one text, or those of several."""


class TokenizationRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def info(self, request: web.Request) -> web.Response:
        """The special tokens and the chat template, under the names that they have in tokenizer_config.json."""
        model = self._service.model
        source = model.pool.template.source if model.pool.template else None
        return json_response(
            TokenizerInfo(chat_template=source, vocab_size=model.vocabulary.size, **model.special_tokens)
        )

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await self._service.bodies.read(request)
        try:
            return json_response(await self._tokens(await parse(body, TokenizeRequest)))
        finally:
            self._service.bodies.forget(len(body))

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await self._service.bodies.read(request)
        try:
            return json_response(await self._texts(await parse(body, DetokenizeRequest)))
        finally:
            self._service.bodies.forget(len(body))

    async def _tokens(self, asked: TokenizeRequest) -> Tokens:
        self._service.check_name(asked.model)
        if (asked.prompt is None) == (asked.texts is None):
            raise wrong("prompt", "give either this or texts")
        texts = [asked.prompt] if asked.prompt is not None else asked.texts or []
        encoded = await self._service.model.pool.encode(texts, asked.add_special_tokens is not False)
        ids = [each.tolist() for each in encoded]
        return Tokens(tokens=ids if asked.prompt is None else ids[0], count=sum(map(len, ids)))

    async def _texts(self, asked: DetokenizeRequest) -> Texts:
        self._service.check_name(asked.model)
        lists = [each for each in asked.tokens if isinstance(each, list)]
        ids = [each for each in asked.tokens if isinstance(each, int)]
        if lists and ids:
            raise wrong("tokens", "ids and lists of ids cannot be mixed")
        self._check_ids(ids)
        for each in lists:
            self._check_ids(each)
        pool = self._service.model.pool
        if lists:
            return Texts(texts=[await pool.decode(each) for each in lists])
        return Texts(prompt=await pool.decode(ids))

    def _check_ids(self, ids: list[int]) -> None:
        size = self._service.model.vocabulary.size
        if ids and max(ids) >= size:
            raise wrong("tokens", f"token ids are from 0 to {size - 1}")
