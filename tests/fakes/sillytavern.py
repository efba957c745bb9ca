"""Fields of SillyTavern's requests for text, as its public source sends them with its default settings."""

from __future__ import annotations

from typing import Any

PROMPT = "Once upon a time"
COUNT = 5

SHARED: dict[str, Any] = {
    "prompt": PROMPT,
    "max_new_tokens": COUNT,
    "max_tokens": COUNT,
    "temperature": 0.7,
    "top_p": 0.5,
    "typical_p": 1,
    "typical": 1,
    "sampler_seed": -1,
    "min_p": 0,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": 40,
    "skew": 0,
    "min_tokens": 0,
    "add_bos_token": True,
    "smoothing_factor": 0,
    "smoothing_curve": 1,
    "dry_allowed_length": 2,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_sequence_breakers": '["\\n", ":", "\\"", "*"]',
    "dry_penalty_last_n": 0,
    "max_tokens_second": 0,
    "stopping_strings": ["\nUser:"],
    "stop": ["\nUser:"],
    "truncation_length": 4096,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "include_reasoning": True,
    "top_a": 0,
    "tfs": 1,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "custom_token_bans": "",
    "banned_strings": [],
    "api_server": "http://127.0.0.1:5000/",
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "nsigma": 0,
    "top_n_sigma": 0,
    "min_keep": 0,
    "adaptive_target": -0.01,
    "adaptive_decay": 0.9,
}
"""What goes to every server for text."""

LLAMA_NAMES: dict[str, Any] = {
    "rep_pen": 1.2,
    "rep_pen_range": 0,
    "repetition_penalty_range": 0,
    "seed": -1,
    "guidance_scale": 1,
    "negative_prompt": "",
    "grammar_string": "",
    "repeat_penalty": 1.2,
    "tfs_z": 1,
    "repeat_last_n": 0,
    "n_predict": COUNT,
    "num_predict": COUNT,
    "num_ctx": 4096,
    "mirostat": 0,
    "ignore_eos": False,
    "rep_pen_slope": 1,
}
"""The same things once more, as other servers call them."""

SEQUENCE_BREAKERS = ["\n", ":", '"', "*"]
"""As servers get them that take no text of JSON."""
