"""OpenAI's dialect: chat, responses, completions, embeddings, models; and vLLM's rerank and score."""

from __future__ import annotations

from console.api.dialects.base import Dialect, Example
from console.api.dialects.openai.chat import Chat
from console.api.dialects.openai.completions import Completions
from console.api.dialects.openai.embeddings import EmbeddingEndpoint
from console.api.dialects.openai.models import Models
from console.api.dialects.openai.responses import Responses
from console.api.dialects.openai.scores import ScoringEndpoints

DIALECT = Dialect(
    name="openai",
    title="OpenAI",
    rank=1,
    endpoints=(Models, Completions, Chat, Responses, EmbeddingEndpoint, ScoringEndpoints),
    example=Example("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
)
