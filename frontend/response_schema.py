"""The fields of `POST /v1/responses`, beside those that all routes have; see `frontend.schema`.

Items and parts are one struct each: which fields a type needs is checked in `frontend.responses`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from frontend.schema import LONGEST_NAME, MOST_TOOLS, Count, FunctionName, Positive, Sampling, Unsupported

Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Nothing = Annotated[list[Any], Meta(max_length=0)]


class InputPart(Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str | None = None

    # What parts of an answer hold beside their text, without effect when it is sent back.
    annotations: Nothing | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None

    # What parts of the types hold that are refused.
    detail: Any = None
    file_data: Any = None
    file_id: Any = None
    file_url: Any = None
    filename: Any = None
    image_url: Any = None
    input_audio: Any = None
    refusal: Any = None


class InputItem(Struct, kw_only=True, forbid_unknown_fields=True):
    type: str | None = None
    """message, where it is left out; function_call, function_call_output, reasoning."""
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    """A JSON object."""
    output: str | list[InputPart] | None = None

    # Accepted without effect: what items of an answer hold as well, or the SDK adds, when they are sent back.
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    parsed_arguments: Any = None
    caller: Unsupported = None
    namespace: Unsupported = None


class TextFormat(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`name`, `description` and `strict` have no effect: every schema is held to."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Unsupported = None


class FunctionTool(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """As OpenAI has it on this route, true where it is left out."""
    allowed_callers: Unsupported = None
    defer_loading: Unsupported = None
    output_schema: Unsupported = None


class FunctionChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class ResponseToolChoice(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function, by `name`; or, of the type allowed_tools, `mode` and `tools`."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[FunctionChoice], Meta(min_length=1)] | None = None


class ResponseStreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None
    """Only false: events are not padded."""


class ResponseRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """The latter without effect: reasoning is not encrypted, and may be sent back as it is."""
    top_logprobs: Count | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]
    truncation: Literal["disabled"] | None = None
    background: bool | None = None
    """Only false, as for `store`: nothing is kept."""
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Those of the other routes that have another name here, or none.
    max_tokens: Unsupported = None
    n: Unsupported = None
    response_format: Unsupported = None

    access_programs: Unsupported = None
    background_options: Unsupported = None
    context_management: Unsupported = None
    conversation: Unsupported = None
    image: Unsupported = None
    max_tool_calls: Unsupported = None
    moderation: Unsupported = None
    previous_response_id: Unsupported = None
    prompt: Unsupported = None
    prompt_cache_options: Unsupported = None
    prompt_cache_retention: Unsupported = None
    reasoning: Unsupported = None
