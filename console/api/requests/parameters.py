"""Parameters that are refused, ignored or clamped, as far as dialects share them.

A refused parameter passes while its value changes nothing; any other value is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.config import PARAMETERS
from engine.errors import InvalidRequest

NOTHING: tuple[object, ...] = (None, "", [], {})
"""Values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a parameter is not supported, and its neutral values (besides NOTHING), which pass.

    asking: values of NOTHING that do ask for something here.
    """

    reason: str
    neutral: tuple[object, ...] = ()
    asking: tuple[object, ...] = ()

    @property
    def passing(self) -> list[object]:
        """Every value that passes."""
        return [*self.neutral, *(value for value in NOTHING if value not in self.asking)]

    def check(self, name: str, value: object) -> None:
        """Pass a neutral value; raises InvalidRequest for any other."""
        if not any(value == passing and _same_kind(value, passing) for passing in self.passing):
            raise InvalidRequest(f"{name} is not supported: {self.reason}", param=name)


def _same_kind(value: object, neutral: object) -> bool:
    """Return whether both or neither are booleans: true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool)


_NO_BEAMS = "beam search is not supported"
TEXT_ONLY = "only text is supported"
_NO_SAMPLER = "unsupported sampler (see docs/sampling.md)"
NOT_CUT = "prompts that are too long are refused, not truncated"

SAMPLING_REFUSED: Mapping[str, Refusal] = {
    "adaptive_target": Refusal(_NO_SAMPLER, (-0.01, -1)),
    "allowed_token_ids": Refusal("use logit_bias"),
    "detokenize": Refusal("answers are text", (True,)),
    "do_sample": Refusal("use temperature 0 for greedy decoding", (True,)),
    "early_stopping": Refusal(_NO_BEAMS, (False,)),
    "encoder_repetition_penalty": Refusal(_NO_SAMPLER, (1,)),
    "epsilon_cutoff": Refusal(_NO_SAMPLER, (0,)),
    "eta_cutoff": Refusal(_NO_SAMPLER, (0,)),
    "guided_decoding_backend": Refusal("the only backend is llguidance", ("auto", "guidance")),
    "guided_whitespace_pattern": Refusal("whitespace in JSON cannot be configured", asking=("",)),
    "kv_transfer_params": Refusal("KV transfer is not supported"),
    "length_penalty": Refusal(_NO_BEAMS, (1.0, 0.0)),
    "logits_processors": Refusal("use logit_bias, banned_strings or a grammar"),
    "max_tokens_second": Refusal("answers are not slowed down", (0,)),
    "min_keep": Refusal(_NO_SAMPLER, (0,)),
    "mm_processor_kwargs": Refusal(TEXT_ONLY),
    "no_repeat_ngram_size": Refusal("use dry_multiplier", (0,)),
    "nsigma": Refusal(_NO_SAMPLER, (0,)),
    "num_beams": Refusal(_NO_BEAMS, (1,)),
    "penalty_alpha": Refusal(_NO_SAMPLER, (0,)),
    "prompt_logprobs": Refusal("use /v1/completions or /v1/chat/completions"),
    "return_token_ids": Refusal("use /v1/completions or /v1/chat/completions", (False,)),
    "return_tokens_as_token_ids": Refusal("tokens are returned as text", (False,)),
    "skew": Refusal(_NO_SAMPLER, (0,)),
    "smoothing_curve": Refusal(_NO_SAMPLER, (1,)),
    "spaces_between_special_tokens": Refusal("special tokens are written by the tokenizer", (True,)),
    "token_healing": Refusal("prompts are continued unchanged", (False,)),
    "top_n_sigma": Refusal(_NO_SAMPLER, (0,)),
    "truncate_prompt_tokens": Refusal("use /v1/completions or /v1/chat/completions"),
    "use_beam_search": Refusal(_NO_BEAMS, (False,)),
    "vllm_xargs": Refusal("extra arguments are not supported"),
}
"""Sampling parameters of vLLM, TabbyAPI and text-generation-webui that no dialect supports."""

LLAMACPP_REFUSED: Mapping[str, Refusal] = {
    "grammar_lazy": Refusal("a grammar applies to the whole answer", (False,)),
    "grammar_triggers": Refusal("a grammar applies to the whole answer"),
    "n_indent": Refusal("use a grammar", (0,)),
    "penalize_nl": Refusal("line breaks are penalised like other tokens", (True,)),
    "post_sampling_probs": Refusal("probabilities are those before sampling", (False,)),
    "preserved_tokens": Refusal("use skip_special_tokens to show control tokens"),
    "sse_ping_interval": Refusal("pings are set for the whole server", (30,)),
    "t_max_predict_ms": Refusal("time limits are set for the whole server", (0, -1)),
    "top_n_sigma": Refusal(_NO_SAMPLER, (0, -1)),
}
"""Parameters of llama.cpp's clients that neither its own endpoints nor the chat support."""

LLAMACPP_INERT = frozenset(
    {
        "backend_sampling",  # how an answer is computed, which does not change it, as the next ones
        "id_slot",
        "n_cache_reuse",
        "n_discard",  # the context is never shifted, so nothing is discarded
        "n_keep",  # likewise
        "slot_id",
        "speculative.n_max",
        "speculative.n_min",
        "speculative.p_min",
    }
)
"""Parameters of llama.cpp's clients that change nothing about an answer."""

MESSAGE_REFUSED: Mapping[str, Refusal] = {
    "audio": Refusal(TEXT_ONLY),
    "function_call": Refusal("use tool_calls, which replaced it"),
    "refusal": Refusal("put its text into content"),
}

FRONTEND_INERT = frozenset(
    {
        "adaptive_decay",  # of adaptive_target, which is refused
        "api_server",  # the frontend's own note of where it sends this, as the next two
        "api_type",
        "cache_prompt",  # prefixes are always cached
        "include_reasoning",  # a raw prompt's answer has no thinking apart from its text
        "legacy_api",
        "num_ctx",  # the context is as long as the model was loaded with
        "speculative_ngram",  # how an answer is computed, which does not change it
    }
)
"""Fields that text frontends send with every request."""


# Clamped parameters, whose values are brought into bounds, or to one that means the same, as /openapi.json and
# docs/api/parameters.md say.

ROOM = "to the room left in the context"
NO_DEFAULT_LENGTH = f"{ROOM}; default: that, or --max-output-len"
DEFAULT_TO_LIMIT = "its default to --max-output-len"
DEFAULT_LENGTH = f"{ROOM}; {DEFAULT_TO_LIMIT}"
CONTEXT_LENGTH = "to the context length of the loaded model"
SAMPLING_CLAMPED: Mapping[str, str] = {
    **{row.http_name: f"{row.sent_low} means {row.low}" for row in PARAMETERS.values() if row.sent_low is not None},
    "dynatemp_range": "the lower end to 0",
    "min_tokens": ROOM,
}
