"""The fields of a request, declared once: names, types, bounds.

`None` is how a client leaves a field out. Fields that no struct lists do not exist; those of type
`Unsupported` are OpenAI's and not served here. What depends on the model or on other fields is checked
in `frontend.jobs`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

MOST_STOPS = 16
LONGEST_STOP = 1024
"""Characters."""
LONGEST_NAME = 256
"""Characters."""
MOST_TOOLS = 128
LONGEST_GRAMMAR = 65_536
"""Characters of a regular expression or of Lark."""
INT32 = (1 << 31) - 1

Unsupported: TypeAlias = None
Count = Annotated[int, Meta(ge=0, le=INT32)]
Positive = Annotated[int, Meta(ge=1, le=INT32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
GrammarText = Annotated[str, Meta(min_length=1, max_length=LONGEST_GRAMMAR)]
StopString = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Unsupported = None


class JsonSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    """`name`, `description` and `strict` have no effect: every schema is held to."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """What both routes take."""

    model: str | None = None
    n: Positive | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None

    stop: StopString | Annotated[list[StopString], Meta(max_length=MOST_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    regex: GrammarText | None = None
    grammar: GrammarText | None = None
    priority: Annotated[int, Meta(ge=-INT32, le=INT32)] | None = None
    return_token_ids: bool | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)] | None = None

    # Accepted without effect.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]] | None = None
    """A text, texts, the ids of one prompt, or those of several (lists, or arrays where they are large)."""
    echo: bool | None = None
    logprobs: Count | None = None
    add_special_tokens: bool | None = None
    best_of: Positive | None = None
    suffix: str | None = None


class ContentPart(Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str | None = None

    # What parts of the types hold that are refused.
    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    file: Any = None
    refusal: Any = None


class Function(Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class Named(Struct, kw_only=True, forbid_unknown_fields=True):
    name: str


class ToolReference(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Named


class AllowedTools(Struct, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReference], Meta(min_length=1)]


class ToolChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function", "allowed_tools"]
    function: Named | None = None
    allowed_tools: AllowedTools | None = None


class CalledFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    arguments: str
    """A JSON object."""
    parsed_arguments: Any = None
    """The SDK sends back what it has parsed; no effect."""


class ToolCall(Struct, kw_only=True, forbid_unknown_fields=True):
    id: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    type: Literal["function"]
    function: CalledFunction
    index: Count | None = None
    """Streamed calls have it; no effect here."""


class ChatMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MOST_TOOLS)] | None = None

    # What an answer of ours holds beside its text, or the SDK adds, when it is sent back as part of the conversation.
    parsed: Any = None
    refusal: Unsupported = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: Unsupported = None
    function_call: Unsupported = None


class ChatRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    messages: list[ChatMessage] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None
    tools: Annotated[list[Tool], Meta(min_length=1, max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    prompt_cache_options: Unsupported = None
    prompt_cache_retention: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None
