"""What the routes share."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

from frontend.engine import Engine
from frontend.errors import ApiError
from frontend.generation import Call
from frontend.jobs import Limits, Planner
from frontend.parse import Bodies
from frontend.store import Store
from toka.config import Config
from toka.messages import ModelCard
from toka.model import open_model
from toka.process import version
from toka.text.chat import ChatTemplate
from toka.text.tokenize import TokenizerPool
from toka.text.vocabulary import Vocabulary

ALIAS = "default"
RETRY_SECONDS = 1


@dataclass(frozen=True, slots=True)
class Model:
    """The model's name, and all that is needed of its text."""

    name: str
    pool: TokenizerPool
    vocabulary: Vocabulary
    planner: Planner
    fingerprint: str
    """Another one where the tokens of a seed may be others, as far as a frontend knows."""
    special_tokens: dict[str, str]


def load_model(config: Config) -> Model:
    """Find and read the tokenizer and the chat template. ValueError, in one sentence, where that fails."""
    source = open_model(config.model)
    tokenizer, template = source.tokenizer(), source.chat_template()
    special = source.special_tokens()
    chat = None if template is None else ChatTemplate(template, special)
    pool, vocabulary = TokenizerPool(tokenizer, chat), Vocabulary(tokenizer)
    limits = Limits(
        max_n=config.max_n,
        max_samples=config.max_samples,
        max_logprobs=config.max_logprobs,
        client_chat_template=config.client_chat_template,
    )
    name, planner = config.served_model_name or source.name, Planner(pool, vocabulary, limits)
    fingerprint = _fingerprint(version(), name, config.model, config.dtype)
    return Model(name, pool, vocabulary, planner, fingerprint, special)


def _fingerprint(*told: str) -> str:
    return f"fp_{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]}"


class Service:
    """The state of one frontend. ValueError, in one sentence, where data_dir cannot be used."""

    def __init__(self, config: Config, engine: Engine, number: int) -> None:
        self.config = config
        self.number = number
        self.engine = engine
        self.bodies = Bodies(config.max_body_bytes, config.body_bytes)
        self.started = int(time.time())
        self.store = Store(config.data_dir) if config.data_dir else None
        """Of files and batches; None where they are off."""
        self.batch_news = asyncio.Event()
        """Set where a batch was created or cancelled."""
        self.draining = False
        self.calls: dict[Call, str] = {}
        """Those that are being answered, each with the id of its answer."""
        self.idle = asyncio.Event()
        """Set while no request is being served."""
        self.idle.set()
        self._serving = 0
        self._model: Model | None = None

    @property
    def model(self) -> Model:
        if self._model is None:
            raise self.later("the tokenizer is being loaded")
        return self._model

    @model.setter
    def model(self, model: Model) -> None:
        self._model = model

    async def close(self) -> None:
        if self._model is not None:
            await self._model.planner.close()
        if self.store is not None:
            self.store.close()

    @property
    def card(self) -> ModelCard:
        if self.engine.card is None:
            raise self.later(self.engine.unavailable or "no replica is ready")
        return self.engine.card

    @property
    def unavailable(self) -> str:
        """Why new requests cannot be served just now; empty where they can."""
        if self.draining:
            return "the server is shutting down"
        return "the tokenizer is being loaded" if self._model is None else self.engine.unavailable

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """While a request is served; ApiError where no new one is taken."""
        if self.draining:
            raise self.later("the server is shutting down")
        self._serving += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._serving -= 1
            if not self._serving:
                self.idle.set()

    def known(self, name: str) -> bool:
        """Whether a request may call the model this."""
        return name in (ALIAS, self.model.name)

    def check_name(self, name: str | None) -> None:
        if name is not None and not self.known(name):
            raise ApiError(404, f"model {name!r} does not exist", param="model", code="model_not_found")

    @staticmethod
    def later(reason: str) -> ApiError:
        return ApiError(503, reason, retry_after=RETRY_SECONDS)
