"""langchain-tests' standard integration tests, of ChatOpenAI at the server that TEST_API_BASE_URL names.

Collected by a pytest of its own, see tests/api/test_langchain_standard.py. The unit tests of that package ask no server
and are left out.
"""

from __future__ import annotations

import os
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class _AtServer(ChatModelIntegrationTests):
    """The model has an adapter, poet. Pictures, sound and documents are refused, and so stay off, as they are."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": os.environ["TEST_API_BASE_URL"],
            "api_key": "none",
            "model": "fake",
            "max_retries": 0,
            "stream_usage": True,
        }

    @property
    def model_override_value(self) -> str:
        return "poet"

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Any:
        details = ["cache_read_input", "reasoning_output"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return self._asked("Hello", stream)

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        return self._asked("Think about it.", stream)

    def _asked(self, prompt: str, stream: bool) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        if not stream:
            return model.invoke(prompt)
        whole: AIMessageChunk | None = None
        for chunk in model.stream(prompt):
            assert isinstance(chunk, AIMessageChunk)
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        return whole


class TestChatCompletions(_AtServer):
    """Over /v1/chat/completions."""


class TestResponses(_AtServer):
    """Over /v1/responses."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestFunctionCalling(_AtServer):
    """Over /v1/chat/completions, with structured output by calls of tools."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}
