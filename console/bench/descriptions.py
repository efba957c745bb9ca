"""What each bench measures and each dialect asks, for whoever chooses one. Light: no bench is imported for it."""

from __future__ import annotations

from collections.abc import Mapping

BENCH_DESCRIPTIONS: Mapping[str, str] = {
    "latency": "How fast one answer is where nobody else asks: prompts one after the other.",
    "users": "How much longer one user waits for the others: each asks again once answered.",
    "threads": "Whether more clients at once get the same inputs done sooner.",
    "grid": "Which workers and max prompts give the most tok/s: both are turned meanwhile, and back.",
    "serve": "What users of a service see at a rate of requests: first tokens, gaps, goodput.",
    "prefix": "What the prefix cache finds of prompts that begin alike, and what that saves.",
    "long": "How long others pause while one long prompt is read in the midst of their answers.",
    "load": "How far loading the model is from the speed of reading its files.",
}
"""By the names of the benches, in the order of the command line."""

DIALECT_DESCRIPTIONS: Mapping[str, str] = {
    "openai": "/v1/completions (vLLM, others)",
    "chat": "/v1/chat/completions",
    "anthropic": "/v1/messages (Anthropic)",
    "tgi": "/generate_stream (TGI)",
    "llamacpp": "/completion (llama.cpp)",
    "tabby": "/v1/completions (TabbyAPI)",
    "ollama": "/api/generate (Ollama)",
    "ollama-chat": "/api/chat (Ollama)",
    "kobold": "/api/extra/generate/stream (KoboldCpp)",
    "textgen": "/api/v1/stream (textgen webui)",
    "generate": "/generate (EricLLM)",
}
"""What of a server is asked, by the names of the dialects, in the order of the command line."""
