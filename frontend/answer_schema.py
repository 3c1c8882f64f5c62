"""What answers hold, declared once for /openapi.json.

Small answers are made of these structs. Completions and chats are made as dicts, where time counts
(`frontend.answers`); tests hold them against what stands here. A field that is UNSET is left out.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from frontend.records import Batch, File

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
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
    token_logprobs: list[float | None]
    """None for the first token of a prompt: nothing stands before it."""
    top_logprobs: list[dict[str, float] | None] | None
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


class AnswerFunction(Shape):
    name: str
    arguments: str
    """JSON."""


class AnswerCall(Shape):
    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    """None where there are calls alone."""
    refusal: None
    reasoning_content: str | UnsetType | None = UNSET
    """Of models that think."""
    tool_calls: list[AnswerCall] | UnsetType = UNSET


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


class FunctionDelta(Shape):
    arguments: str
    """More of them."""
    name: str | UnsetType = UNSET


class ToolCallDelta(Shape):
    """The first of a call has all fields."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Shape):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


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


# --- Responses


class InputDetails(Shape):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Shape):
    code: str
    message: str


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class Response(Shape):
    """OpenAI's, of whose fields those of the request are repeated."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    system_fingerprint: str
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[dict[str, Any]]
    """Items of the types message, function_call and reasoning."""
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    prompt_token_ids: Ids = UNSET
    token_ids: Ids = UNSET


class ResponseEvent(Struct):
    """One of OpenAI's typed events, with the fields of its type."""

    type: str
    sequence_number: int


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
