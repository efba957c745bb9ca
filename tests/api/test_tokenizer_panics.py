"""A text that the model's tokenizer panics on: its request gets a sentence, and the next one is served."""

from __future__ import annotations

import json
from pathlib import Path

from tests.api.harness import serving
from tests.fakes.model import write_fake_model

SPIN = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
"""Takes time with the power of the x's: the library's engine gives up after ten million steps, and panics."""


async def test_a_prompt_that_the_tokenizer_panics_on_is_a_400_and_the_next_is_answered(tmp_path: Path) -> None:
    file = write_fake_model(tmp_path) / "tokenizer.json"
    parts = json.loads(file.read_text())
    before = [parts["pre_tokenizer"]] if parts["pre_tokenizer"] else []
    file.write_text(json.dumps(parts | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPIN, *before]}}))
    async with serving(tmp_path) as api:
        for path, body in (
            ("/v1/completions", {"prompt": "x" * 60}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 60}]}),
        ):
            error = await api.refusal(path, **body)
            assert error["message"].startswith("the model's tokenizer cannot tokenize this text: Onig")
            assert error["code"] == "invalid_request"
        async with api.http.post("/tokenize", json={"prompt": "x" * 60}) as response:
            assert response.status == 400
            assert "cannot tokenize this text" in await response.text()
        assert (await api.post("/v1/completions", prompt="hello", max_tokens=2))["usage"]["completion_tokens"] == 2
