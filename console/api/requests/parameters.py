"""The one table of parameters that clients send and we do not honour, and of those that mean nothing to us; those that
are brought into bounds are in `console.api.requests.parameters`.

A refused parameter is fine while its value changes nothing; any other value is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a parameter is not honoured, and the values (besides null) at which that makes no difference."""

    reason: str
    neutral: tuple[object, ...] = ()

    def check(self, name: str, value: object) -> None:
        """Pass a neutral value; raises InvalidRequest for any other."""
        if value is not None and not any(value == neutral and _same_kind(value, neutral) for neutral in self.neutral):
            raise InvalidRequest(f"{name} is not supported: {self.reason}", param=name)


def _same_kind(value: object, neutral: object) -> bool:
    """Keeps true and 1 apart."""
    return isinstance(value, bool) == isinstance(neutral, bool)


_TOOLS_INSTEAD = "use tools and tool_choice, which replaced it"
_NO_BEAMS = "answers are sampled; there is no beam search"
_TEXT_ONLY = "this server takes and gives text only"
_NO_SAMPLER = "this sampler is not there; docs/sampling.md names those that are"
_NO_THINKING = "answers have no thinking apart from their text"
_NOT_CUT = "a prompt that is too long is refused, never cut"

SAMPLING_REFUSED: Mapping[str, Refusal] = {
    "adaptive_target": Refusal(_NO_SAMPLER, (-0.01, -1)),
    "allowed_token_ids": Refusal("use logit_bias", ([],)),
    "detokenize": Refusal("answers are text", (True,)),
    "do_sample": Refusal("use temperature 0 for the most likely tokens", (True,)),
    "early_stopping": Refusal(_NO_BEAMS, (False,)),
    "encoder_repetition_penalty": Refusal(_NO_SAMPLER, (1,)),
    "epsilon_cutoff": Refusal(_NO_SAMPLER, (0,)),
    "eta_cutoff": Refusal(_NO_SAMPLER, (0,)),
    "guided_decoding_backend": Refusal("answers are held to formats by llguidance", ("auto", "guidance")),
    "guided_whitespace_pattern": Refusal("whitespace in JSON is a space, or a line's end and indentation"),
    "kv_transfer_params": Refusal("workers pass no KV pages on", ({},)),
    "length_penalty": Refusal(_NO_BEAMS, (1.0, 0.0)),
    "logits_processors": Refusal("use logit_bias, banned_strings or a grammar", ([],)),
    "max_tokens_second": Refusal("answers come as fast as they are computed", (0,)),
    "min_keep": Refusal(_NO_SAMPLER, (0,)),
    "mm_processor_kwargs": Refusal(_TEXT_ONLY, ({},)),
    "no_repeat_ngram_size": Refusal("use dry_multiplier", (0,)),
    "nsigma": Refusal(_NO_SAMPLER, (0,)),
    "num_beams": Refusal(_NO_BEAMS, (1,)),
    "penalty_alpha": Refusal(_NO_SAMPLER, (0,)),
    "prompt_logprobs": Refusal("use /v1/completions or /v1/chat/completions"),
    "return_token_ids": Refusal("use logprobs for what the tokens were", (False,)),
    "return_tokens_as_token_ids": Refusal("tokens are told as text", (False,)),
    "skew": Refusal(_NO_SAMPLER, (0,)),
    "smoothing_curve": Refusal(_NO_SAMPLER, (1,)),
    "spaces_between_special_tokens": Refusal("special tokens are shown as the tokenizer writes them", (True,)),
    "token_healing": Refusal("prompts are continued as they are", (False,)),
    "top_n_sigma": Refusal(_NO_SAMPLER, (0,)),
    "truncate_prompt_tokens": Refusal(_NOT_CUT),
    "use_beam_search": Refusal(_NO_BEAMS, (False,)),
    "vllm_xargs": Refusal("there are no arguments beyond the fields", ({},)),
}
"""Asked of every dialect by clients of vLLM, TabbyAPI and text-generation-webui."""

COMPLETION_REFUSED: Mapping[str, Refusal] = {
    **SAMPLING_REFUSED,
    "add_bos_token": Refusal("prompts are tokenized with the model's own special tokens", (True,)),
    "grammar_retain_state": Refusal("a grammar holds for one answer", (False,)),
    "memory": Refusal("put it into the prompt", ("",)),
    "trim_stop": Refusal("an answer ends before its stop string; use include_stop_str_in_output", (True,)),
    "add_special_tokens": Refusal("prompts are tokenized with the model's own special tokens", (True,)),
    "suffix": Refusal("text can be continued, not filled in", ("",)),
}

CHAT_REFUSED: Mapping[str, Refusal] = {
    **SAMPLING_REFUSED,
    "add_special_tokens": Refusal("the chat template adds the special tokens", (False,)),
    "audio": Refusal(_TEXT_ONLY),
    "chat_template": Refusal("the model's own chat template is used"),
    "documents": Refusal("put documents into the messages", ([],)),
    "echo": Refusal("the answer alone is given; use continue_final_message to go on from a text", (False,)),
    "function_call": Refusal(_TOOLS_INSTEAD, ("none", "auto")),
    "functions": Refusal(_TOOLS_INSTEAD, ([],)),
    "modalities": Refusal(_TEXT_ONLY, (["text"],)),
    "prediction": Refusal("answers are not predicted"),
    "reasoning_effort": Refusal("use chat_template_kwargs where the model's template knows it"),
    "store": Refusal("answers are not kept", (False,)),
    "verbosity": Refusal("say in a message how long the answer should be", ("medium",)),
    "web_search_options": Refusal("this server does not search the web"),
}

TOKENIZE_CHAT_REFUSED: Mapping[str, Refusal] = {
    name: CHAT_REFUSED[name] for name in ("add_special_tokens", "chat_template", "documents")
}

TOKENIZE_INERT = frozenset({"user"})  # who asks; not looked at

GENERATE_REFUSED: Mapping[str, Refusal] = {
    **SAMPLING_REFUSED,
    "filters": Refusal("use stop", ([],)),
    "logprobs": Refusal("use /v1/completions for log-probabilities"),
}

TGI_REFUSED: Mapping[str, Refusal] = {
    "watermark": Refusal("answers carry no watermark", (False,)),
}

EMBEDDING_REFUSED: Mapping[str, Refusal] = {
    "add_special_tokens": Refusal("texts are tokenized with the model's own special tokens", (True,)),
    "embed_dtype": Refusal("vectors are float32", ("float32",)),
    "endianness": Refusal("vectors are in the machine's byte order", ("native",)),
    "input_type": Refusal("the model makes the same vector of a query as of a document"),
    "messages": Refusal("send the text as input"),
    "normalize": Refusal("vectors have length 1", (True,)),
    "truncate_prompt_tokens": Refusal("a text that is too long is refused, never cut"),
}

TEXTGEN_REFUSED: Mapping[str, Refusal] = {
    **{name: refusal for name, refusal in SAMPLING_REFUSED.items() if name != "do_sample"},
    "chat_generation_attempts": Refusal("send the prompt again for another answer", (1,)),
    "custom_stopping_strings": Refusal("use stopping_strings", ("",)),
    "preset": Refusal("there are no presets here; send their settings", ("None", "")),
    "stop_at_newline": Refusal('put "\\n" into stopping_strings', (False,)),
    "use_max_seq_len": Refusal("set max_new_tokens", (False,)),
}

_NO_STORY = "this server keeps no story; put it into the prompt"
_AS_THEY_ARE = "prompts and answers stay as they are"

KOBOLD_REFUSED: Mapping[str, Refusal] = {
    **SAMPLING_REFUSED,
    "bypass_eos": Refusal("use ban_eos_token", (False,)),
    "disable_input_formatting": Refusal(_AS_THEY_ARE, (True,)),
    "disable_output_formatting": Refusal(_AS_THEY_ARE, (True,)),
    "frmtadsnsp": Refusal(_AS_THEY_ARE, (False,)),
    "frmtrmblln": Refusal(_AS_THEY_ARE, (False,)),
    "frmtrmspch": Refusal(_AS_THEY_ARE, (False,)),
    "frmttriminc": Refusal(_AS_THEY_ARE, (False,)),
    "grammar_retain_state": Refusal("a grammar holds for one answer", (False,)),
    "images": Refusal(_TEXT_ONLY, ([],)),
    "soft_prompt": Refusal("there are no soft prompts", ("",)),
    "use_authors_note": Refusal(_NO_STORY, (False,)),
    "use_memory": Refusal(_NO_STORY, (False,)),
    "use_story": Refusal(_NO_STORY, (False,)),
    "use_userscripts": Refusal(_NO_STORY, (False,)),
    "use_world_info": Refusal(_NO_STORY, (False,)),
}

MESSAGE_REFUSED: Mapping[str, Refusal] = {
    "audio": Refusal(_TEXT_ONLY),
    "function_call": Refusal("use tool_calls, which replaced it"),
    "refusal": Refusal("put what was said into content"),
}

FRONTEND_INERT = frozenset(
    {
        "adaptive_decay",  # of adaptive_target, which is refused
        "api_server",  # the frontend's own note of where it sends this, as the next two
        "api_type",
        "cache_prompt",  # prefixes are always cached
        "include_reasoning",  # answers have no thinking apart from their text
        "legacy_api",
        "num_ctx",  # the context is as long as the model was loaded with
        "speculative_ngram",  # how an answer is computed, which does not change it
    }
)
"""What text frontends send along with everything."""

OPENAI_INERT = FRONTEND_INERT | frozenset(
    {
        "metadata",  # labels of the client's own
        "prompt_cache_key",  # a hint: prefixes are cached by what they are
        "prompt_cache_retention",  # likewise
        "request_id",  # answers carry ids of our own
        "safety_identifier",  # who asks; not looked at
        "service_tier",  # there is one
        "truncation_length",  # to what the frontend has cut the prompt; a longer one is refused, never cut
        "user",  # who asks; not looked at
    }
)

ANTHROPIC_REFUSED: Mapping[str, Refusal] = {
    "container": Refusal("there are no containers here"),
    "context_management": Refusal("a conversation is answered as it is"),
    "diagnostics": Refusal("GET /metrics tells of the prefix cache"),
    "inference_geo": Refusal("answers are computed where this server is"),
    "mcp_servers": Refusal("this server calls no others", ([],)),
    "output_format": Refusal("use output_config.format, which replaced it"),
    "speed": Refusal("there is one speed", ("standard",)),
    "thinking": Refusal(_NO_THINKING, ({"type": "disabled"},)),
}

ANTHROPIC_OUTPUT_REFUSED: Mapping[str, Refusal] = {
    "effort": Refusal("say in a message how much is to be said"),
}
"""Fields of output_config."""

ANTHROPIC_TOOLS_REFUSED: Mapping[str, Refusal] = {
    "allowed_callers": Refusal("the model itself calls tools", (["direct"],)),
    "defer_loading": Refusal("the model is told of all tools", (False,)),
    "input_examples": Refusal("put them into the description", ([],)),
}
"""Fields of a tool."""

ANTHROPIC_BLOCKS_REFUSED: Mapping[str, Refusal] = {
    "document": Refusal(_TEXT_ONLY),
    "image": Refusal(_TEXT_ONLY),
    "redacted_thinking": Refusal(_NO_THINKING),
    "search_result": Refusal("put what was found into text blocks"),
    "thinking": Refusal(_NO_THINKING),
}
"""Blocks of a message's content."""

ANTHROPIC_INERT = frozenset(
    {
        "cache_control",  # prefixes are cached by what they are
        "metadata",  # who asks; not looked at
        "service_tier",  # there is one
    }
)

_NO_PICTURES = Refusal("this server makes no pictures", (0,))

OLLAMA_REFUSED: Mapping[str, Refusal] = {
    "height": _NO_PICTURES,
    "images": Refusal(_TEXT_ONLY, ([],)),
    "shift": Refusal("an answer ends with the context", (False,)),
    "steps": _NO_PICTURES,
    "suffix": Refusal("text can be continued, not filled in", ("",)),
    "template": Refusal("the model's own chat template is used; raw takes a prompt that is made already", ("",)),
    "truncate": Refusal(_NOT_CUT, (False,)),
    "width": _NO_PICTURES,
}

OLLAMA_MESSAGE_REFUSED: Mapping[str, Refusal] = {
    "images": Refusal(_TEXT_ONLY, ([],)),
    "thinking": Refusal(_NO_THINKING, ("",)),
}

OLLAMA_OPTIONS_REFUSED: Mapping[str, Refusal] = {
    "embedding_only": Refusal("the model is loaded whole", (False,)),
    "penalize_newline": Refusal("line breaks are penalised as all tokens are", (True,)),
    "rope_frequency_base": Refusal("how positions are scaled is set where the model is loaded", (0,)),
    "rope_frequency_scale": Refusal("how positions are scaled is set where the model is loaded", (0,)),
    "vocab_only": Refusal("the model is loaded whole", (False,)),
}

OLLAMA_OPTIONS_INERT = frozenset(
    {
        "f16_kv",  # how the model is loaded is the operator's choice, and so are the others here
        "logits_all",
        "low_vram",
        "main_gpu",
        "num_batch",
        "num_gpu",
        "num_keep",  # the context is never shifted, so all of it is kept
        "num_thread",
        "numa",
        "use_mlock",
        "use_mmap",
    }
)


# Which parameters are brought to what there is room for, or to what means the same here, and how.
#
# A client that sends one is not refused; /openapi.json and docs/api/parameters.md say what becomes of it.

_ROOM = "to the room that the prompt leaves in the context"
_NO_DEFAULT_LENGTH = f"{_ROOM}; left out, it is that, or --max-output-len"
_DEFAULT_TO_LIMIT = "its default to --max-output-len"
_DEFAULT_LENGTH = f"{_ROOM}; {_DEFAULT_TO_LIMIT}, too"
_CONTEXT = "to the context that the model was loaded with"
_OFF = "-1 is 0, which is off"
_EVERYTHING = "-1 is 0, which is everything"

SAMPLING_CLAMPED: Mapping[str, str] = {
    "dry_range": _EVERYTHING,
    "dynatemp_range": "the lower end to 0",
    "min_tokens": _ROOM,
    "repetition_range": _EVERYTHING,
    "top_k": _OFF,
}

COMPLETION_CLAMPED: Mapping[str, str] = {**SAMPLING_CLAMPED, "max_tokens": _DEFAULT_LENGTH}

CHAT_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "max_completion_tokens": _NO_DEFAULT_LENGTH,
    "max_tokens": _NO_DEFAULT_LENGTH,
}

GENERATE_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "max_tokens": _DEFAULT_LENGTH,
    "top_a": "1 is 0, which is off",
}

TGI_CLAMPED: Mapping[str, str] = {
    "max_new_tokens": _NO_DEFAULT_LENGTH,
    "seed": "the upper half of its 64 bits to the lower",
}

KOBOLD_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "max_context_length": _CONTEXT,
    "max_length": _DEFAULT_TO_LIMIT,
    "prompt": "to its end, where it is too long",
}

TEXTGEN_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "max_new_tokens": _DEFAULT_TO_LIMIT,
    "prompt": "to its end, where it is too long",
    "truncation_length": _CONTEXT,
}

ANTHROPIC_CLAMPED: Mapping[str, str] = {**SAMPLING_CLAMPED, "max_tokens": _ROOM}

OLLAMA_OPTIONS_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "num_ctx": _CONTEXT,
    "num_predict": _NO_DEFAULT_LENGTH,
}

OLLAMA_EMBED_CLAMPED: Mapping[str, str] = {"input": "to its beginning, where it is too long and truncate is not false"}
OLLAMA_EMBEDDINGS_CLAMPED: Mapping[str, str] = {"prompt": "to its beginning, where it is too long"}
