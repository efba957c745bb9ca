"""A chat request's body as OpenAI's and vLLM's clients send it, and the fields that it shares with a completion's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from console.api.requests.chat_prompt import ConversationFields
from console.api.requests.parameters import (
    FRONTEND_INERT,
    LLAMACPP_INERT,
    LLAMACPP_REFUSED,
    NO_DEFAULT_LENGTH,
    SAMPLING_CLAMPED,
    SAMPLING_REFUSED,
    TEXT_ONLY,
    Refusal,
)
from console.api.requests.prompts import Truncation, TruncationFields
from console.api.requests.sampling import SamplingFields
from console.api.requests.schemas import ANSWER_TOKENS, SAMPLERS
from console.api.requests.served_model import ServedModel
from console.api.requests.thinking import ThinkingOptions
from engine.config import MAX_LOGPROBS
from engine.errors import InvalidRequest

_TOOLS_INSTEAD = "use tools and tool_choice, which replaced it"

_SUPPORTED = ("return_token_ids", "truncate_prompt_tokens")
OPENAI_REFUSED = {name: refusal for name, refusal in SAMPLING_REFUSED.items() if name not in _SUPPORTED}

_REFUSED: Mapping[str, Refusal] = {
    **OPENAI_REFUSED,
    **LLAMACPP_REFUSED,
    "add_special_tokens": Refusal("the chat template adds the special tokens", (False,)),
    "audio": Refusal(TEXT_ONLY),
    "chat_template": Refusal("the model's own chat template is used"),
    "documents": Refusal("put documents into messages"),
    "echo": Refusal("only the answer is returned; use continue_final_message to continue a text", (False,)),
    "function_call": Refusal(_TOOLS_INSTEAD, ("none", "auto")),
    "functions": Refusal(_TOOLS_INSTEAD),
    "modalities": Refusal(TEXT_ONLY, (["text"],)),
    "n_predict": Refusal("use max_completion_tokens", (-1,)),
    "n_probs": Refusal("use logprobs and top_logprobs", (0,)),
    "parse_tool_calls": Refusal("calls are always parsed", (True,)),
    "prediction": Refusal("predicted outputs are not supported"),
    "reasoning_format": Refusal("thinking is always apart from the answer, in reasoning_content", ("auto", "deepseek")),
    "reasoning_in_content": Refusal("thinking is always apart from the answer, in reasoning_content", (False,)),
    "response_fields": Refusal("the answer has all of its fields"),
    "return_tokens": Refusal("use return_token_ids", (False,)),
    "store": Refusal("answers are not stored", (False,)),
    "thinking_forced_open": Refusal("the chat template opens the thinking", (False,)),
    "timings_per_token": Refusal("use why, or /completion, whose events have timings", (False,)),
    "verbosity": Refusal("state the length of the answer in a message", ("medium",)),
    "web_search_options": Refusal("web search is not supported", asking=({},)),
}

_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "max_completion_tokens": NO_DEFAULT_LENGTH,
    "max_tokens": NO_DEFAULT_LENGTH,
}

OPENAI_INERT = FRONTEND_INERT | frozenset(
    {
        "metadata",  # labels of the client's own
        "prompt_cache_key",  # a hint: prefixes are cached by what they are
        "prompt_cache_retention",  # likewise
        "request_id",  # answers carry ids of our own
        "safety_identifier",  # labels of the client's own
        "service_tier",  # there is one
        "truncation_length",  # the frontend truncates to it; longer prompts are refused
        "user",  # labels of the client's own
    }
)


class StreamOptions(BaseModel):
    """include_usage: send the usage as a last chunk.  continuous_usage_stats: also with every chunk, as in vLLM.

    include_obfuscation: OpenAI pads chunks to one length where it is true; here they are never padded.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class OpenAiFields(SamplingFields, TruncationFields):
    """Fields of completions and chat besides sampling.

    prompt_logprobs: number of alternatives per prompt token, as in vLLM.  return_token_ids: add the ids of prompt and
    answer, as in vLLM.  return_progress: report in a stream how far the prompt is computed, as llama.cpp does.
    """

    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_progress: bool = False

    @property
    def reports_prompt(self) -> bool:
        """True where a stream is to report it; llama.cpp does not report it elsewhere either."""
        return self.stream and self.return_progress

    def check_prompt_logprobs(self) -> None:
        """Raise InvalidRequest for prompt_logprobs in a stream, whose chunks have no place for them."""
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs are not supported in a stream", param="prompt_logprobs")

    @property
    def include_usage(self) -> bool:
        """True if the stream ends with the usage; raises InvalidRequest where there is no stream."""
        wants = self.stream_options or StreamOptions()
        if not self.stream and (wants.include_usage or wants.continuous_usage_stats):
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        return self.stream and bool(self.why or wants.include_usage or wants.continuous_usage_stats)


class ChatBody(OpenAiFields, ConversationFields):
    """A chat request. max_tokens and max_completion_tokens are the same; None is up to the context's end.

    thinking_token_budget: most tokens of thinking, which is closed then; 0 switches it off.
    include_reasoning: false leaves the thinking out of the answer.
    samplers: samplers in their order, as llama.cpp's clients list them; accepted where it has all that the request
    uses, in an order equivalent to one of docs/sampling.md.
    """

    refused = _REFUSED
    inert = (OPENAI_INERT | LLAMACPP_INERT) - {"include_reasoning"}
    clamped = _CLAMPED
    aliases: ClassVar[Mapping[str, str]] = {**SamplingFields.aliases, "thinking_budget": "thinking_token_budget"}

    max_tokens: Annotated[int | None, ANSWER_TOKENS] = None
    max_completion_tokens: Annotated[int | None, ANSWER_TOKENS] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    thinking_token_budget: Annotated[int | None, Field(ge=0)] = None
    include_reasoning: bool = True
    samplers: Annotated[object, SAMPLERS] = None

    @property
    def thinking(self) -> ThinkingOptions:
        """The client's wishes for the thinking."""
        return replace(super().thinking, budget=self.thinking_token_budget)

    def prompt_truncation(self, model: ServedModel) -> Truncation | None:
        """Return how to truncate the conversation's prompt; raises InvalidRequest."""
        return self.truncation(model, max_tokens=self.token_limit)

    @property
    def token_limit(self) -> int | None:
        """The limit, by either name; raises InvalidRequest where they differ."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives per token, None for no log-probabilities at all; raises InvalidRequest."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None
