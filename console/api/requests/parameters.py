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


_NO_BEAMS = "answers are sampled; there is no beam search"
TEXT_ONLY = "this server takes and gives text only"
_NO_SAMPLER = "this sampler is not there; docs/sampling.md names those that are"
NO_THINKING = "answers have no thinking apart from their text"
NOT_CUT = "a prompt that is too long is refused, never cut"

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
    "mm_processor_kwargs": Refusal(TEXT_ONLY, ({},)),
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
    "truncate_prompt_tokens": Refusal(NOT_CUT),
    "use_beam_search": Refusal(_NO_BEAMS, (False,)),
    "vllm_xargs": Refusal("there are no arguments beyond the fields", ({},)),
}
"""Asked of every dialect by clients of vLLM, TabbyAPI and text-generation-webui."""

MESSAGE_REFUSED: Mapping[str, Refusal] = {
    "audio": Refusal(TEXT_ONLY),
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


# Which parameters are brought to what there is room for, or to what means the same here, and how.
#
# A client that sends one is not refused; /openapi.json and docs/api/parameters.md say what becomes of it.

ROOM = "to the room that the prompt leaves in the context"
NO_DEFAULT_LENGTH = f"{ROOM}; left out, it is that, or --max-output-len"
DEFAULT_TO_LIMIT = "its default to --max-output-len"
DEFAULT_LENGTH = f"{ROOM}; {DEFAULT_TO_LIMIT}, too"
CONTEXT_LENGTH = "to the context that the model was loaded with"
_OFF = "-1 is 0, which is off"
_EVERYTHING = "-1 is 0, which is everything"

SAMPLING_CLAMPED: Mapping[str, str] = {
    "dry_range": _EVERYTHING,
    "dynatemp_range": "the lower end to 0",
    "min_tokens": ROOM,
    "repetition_range": _EVERYTHING,
    "top_k": _OFF,
}
