"""What answers hold, declared once for /openapi.json.

Small answers are made of these structs. Completions and chats are made as dicts, where time counts
(`frontend.answers`); tests hold them against what stands here. A field that is UNSET is left out.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from frontend.records import Batch, File

FinishReason = Literal["stop", "length", "abort"]
Ids = list[int] | UnsetType


class Shape(Struct, forbid_unknown_fields=True):
    """An object without other fields than those declared."""


# --- Errors


class ErrorDetails(Shape):
    message: str
    type: str
    param: str | None
    """The field that is wrong."""
    code: str | None


class Error(Shape):
    error: ErrorDetails


class Unavailable(Error):
    status: Literal["unavailable"]
    reason: str


# --- Completions and chats


class CachedTokens(Shape):
    cached_tokens: int


class TokenUsage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Head(Shape):
    """What all answers that generate begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionPart(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: Ids = UNSET
    prompt_token_ids: Ids = UNSET


class CompletionChoice(CompletionPart):
    finish_reason: FinishReason


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage


class CompletionChunk(Head):
    object: Literal["text_completion"]
    choices: list[CompletionPart]
    usage: TokenUsage | UnsetType | None = UNSET


class LikelyToken(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(Shape):
    content: list[ChatToken]
    refusal: None


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: str | UnsetType | None = UNSET
    """Of models that think."""


class ChatChoice(Shape):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: Ids = UNSET


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: Ids = UNSET


class ChatDelta(Shape):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatPart(Shape):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: Ids = UNSET


class ChatCompletionChunk(Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatPart]
    usage: TokenUsage | UnsetType | None = UNSET
    prompt_token_ids: Ids = UNSET


# --- The rest


class Aborted(Shape):
    aborted: int
    """Requests that were ended."""


class Health(Shape):
    frontend: int
    replicas: int
    queued: int
    """Requests that wait at the broker."""
    running: int
    """Sequences of the replica that answered."""
    waiting: int
    pages_used: int
    pages: int
    status: Literal["ok"] = "ok"


class Ready(Shape):
    frontend: int
    status: Literal["ok"] = "ok"


class Model(Shape):
    id: str
    created: int
    max_model_len: int | UnsetType = UNSET
    """Most tokens of prompt and output together; left out until a replica has said it."""
    object: Literal["model"] = "model"
    owned_by: Literal["toka"] = "toka"


class ModelList(Shape):
    data: list[Model]
    object: Literal["list"] = "list"


class Tokens(Shape):
    tokens: list[int | list[int]]
    """Of the prompt; or of each of the texts."""
    count: int
    """All of them."""


class Texts(Shape):
    prompt: str | UnsetType = UNSET
    texts: list[str] | UnsetType = UNSET


class TokenizerInfo(Shape):
    """The special tokens and the chat template, under the names that they have in tokenizer_config.json."""

    chat_template: str | None
    vocab_size: int
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | UnsetType = UNSET
    sep_token: str | UnsetType = UNSET
    cls_token: str | UnsetType = UNSET
    mask_token: str | UnsetType = UNSET


class Page(Shape, kw_only=True):
    has_more: bool
    first_id: str | None
    last_id: str | None
    """What `after` takes for the next page."""
    object: Literal["list"] = "list"


class FileList(Page):
    data: list[File]


class BatchList(Page):
    data: list[Batch]


class FileDeleted(Shape):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class Document(Shape):
    """OpenAPI 3.1."""

    openapi: str
    info: dict[str, Any]
    servers: list[dict[str, Any]]
    security: list[dict[str, Any]]
    paths: dict[str, Any]
    components: dict[str, Any]
