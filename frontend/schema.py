"""The fields of a request, declared once: names, types, bounds, and for /openapi.json what they mean.

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
LogitBias = Annotated[
    dict[int, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}}),
]
GrammarText = Annotated[str, Meta(min_length=1, max_length=LONGEST_GRAMMAR)]
StopString = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """A last chunk without choices tells the usage."""
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
    """The served model's name, or `default`; may be left out."""
    n: Positive | None = None
    """Samples of each prompt; the prompt is computed once."""
    max_tokens: Count | None = None
    """Most tokens to generate."""
    stream: bool | None = None
    """Send events as tokens come, instead of one answer."""
    stream_options: StreamOptions | None = None

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32)] | None = None
    """Sample from the k likeliest tokens; 0 or -1: from all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Leave out tokens less likely than this times the likeliest one."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    """Logits of tokens seen in prompt or output are divided by it where positive, else multiplied."""
    logit_bias: LogitBias | None = None
    """By token id, added to the logit."""
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    """The same seed, fields and system_fingerprint draw the same tokens from the same logits."""

    stop: StopString | Annotated[list[StopString], Meta(max_length=MOST_STOPS)] | None = None
    """The answer ends before any of these texts."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the answer, beside the model's own."""
    min_tokens: Count | None = None
    """No token may end the answer before so many."""
    ignore_eos: bool | None = None
    """The model's own end-of-sequence tokens do not end the answer."""
    response_format: ResponseFormat | None = None
    """What the answer has to be: text, a JSON object, or JSON that matches a schema."""
    regex: GrammarText | None = None
    """A regular expression that the whole answer matches."""
    grammar: GrammarText | None = None
    """A grammar in llguidance's variant of Lark that the whole answer matches."""
    priority: Annotated[int, Meta(ge=-INT32, le=INT32)] | None = None
    """Lower is sooner; 0 where it is left out."""
    return_token_ids: bool | None = None
    """Answer with the ids of the prompt and of each choice, too."""
    request_id: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)] | None = None
    """The answer's `id`, by which it can be aborted."""

    user: str | None = None
    """Accepted without effect."""
    metadata: dict[str, str] | None = None
    """Accepted without effect."""
    store: bool | None = None
    """Accepted without effect."""
    service_tier: str | None = None
    """Accepted without effect."""
    safety_identifier: str | None = None
    """Accepted without effect."""
    prompt_cache_key: str | None = None
    """Accepted without effect."""


class CompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    """A text, texts, the ids of one prompt, or those of several (lists, or arrays where they are large)."""
    echo: bool | None = None
    """Begin each text with its prompt."""
    logprobs: Count | None = None
    """Log-probabilities of the tokens, and of so many of the likeliest ones."""
    add_special_tokens: bool | None = None
    """Whether texts begin with the tokenizer's special tokens; they do where it is left out."""
    best_of: Positive | None = None
    """Only the value of n is supported."""
    suffix: str | None = None
    """Not supported."""


class ContentPart(Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    """Only `text` is supported."""
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
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Positive | None = None
    """Most tokens to generate; as many as the context has room for where it is left out."""
    max_completion_tokens: Positive | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    """Log-probabilities of so many of the likeliest tokens; needs logprobs."""
    add_generation_prompt: bool | None = None
    """Begin a new turn of the assistant, also behind a message of the assistant."""
    continue_final_message: bool | None = None
    """Go on with the last message, the assistant's; so it is where the other field is left out."""
    chat_template: str | None = None
    """A Jinja template of the client's; needs the server's setting client_chat_template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template."""
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
