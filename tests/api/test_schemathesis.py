"""schemathesis over the server's own openapi.json: whatever is sent, no answer is a 5xx, each is as it is told, and
what the document allows is accepted."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Served, serving
from tests.api.operators import FolderOperator
from tests.fakes.backend import FakeBackend, saying
from tests.fakes.model import fake_spec, write_fake_model

pytestmark = pytest.mark.long

FEWEST_CASES = 2000
FEWEST_ACCEPTED = 400
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance,response_headers_conformance"
_PATIENCE_S = 500
_NOT_ASKED = "^/admin/(unload|events|estimate|adapters|workers|reconfigure)"
"""What would unload the model, or streams without an end, and what depends on this machine's memory."""

EXPLAINED = {
    "what the model has: tokens": r"the model has tokens 0 to",
    "what the model has: numbers in a vector": r"dimensions is -?\d+; this model's vectors have",
    "what the model has: a template": r"this model's chat template (does not support|knows none)",
    "what the model has: thinking": r" does not (support thinking|think)$",
    "what the model has: an operator": r"a model that an operator loaded",
    "what the model has: a context": r"of the \d+ tokens of|too long:|maximum context length|the limit is \d+",
    "two names of one field may not differ": r" differ; send one of them",
    "a field needs another": r"top_logprobs needs|no negative_prompt|needs sampling|but tools is empty"
    r"|should have one(?:, or| of)|dynamic_temperature needs|negative_prompt is empty|rep_pen_slope is not supported",
    "a field excludes another": r"seed cannot be set|raw takes the prompt|both set a format|not supported in a stream"
    r"|are ranked only by|cannot be streamed|cannot be had|it must be at least n|n must be 1 in a stream"
    r"|parse_special cannot be false",
    "a field bounds another": r"more than min_temp|max_temp is .* between|the answer may have|must be at least 1"
    r"|answers; the limit is|must be less than max_tokens",
    "a conversation is a sequence": r"tool_result blocks are missing|starts the answer|should be a call:"
    r"|tool_call_id should be|an unknown call|messages\[\d+\]\.tool_call_id",
    "JSON, patterns, grammars and names within values": r"JSON object, as text|is not valid JSON|something satisfies"
    r"|is not a supported|is not a sampler|samplers puts|custom_token_bans should be|dry_sequence_breakers",
    "two dialects at one path": r"is not a field of this endpoint",
}
"""Why the server may refuse what the document allows: JSON Schema cannot say it, or only this model is so."""


@pytest.mark.slow
@pytest.mark.timeout(560)
@pytest.mark.parametrize(
    ("left_out", "mode"),
    [
        ("^/(?!v1/)", "negative"),
        ("^/(?!api/)", "negative"),
        ("^/(v1|api)/", "negative"),
        ("^/(?!(v1/(chat/)?completions|generate)$)", "positive"),
    ],
    ids=["v1", "api", "others", "allowed"],
)
async def test_two_thousand_cases_make_no_server_error(tmp_path: Path, left_out: str, mode: str) -> None:
    """The model answers at once with a short word. What streams without an end is left out, and so is what would unload
    the model, for then there would be nothing to ask. The bounds of what the document allows are asked of the endpoints
    that have all parameters, whose code all dialects share; the next test asks each endpoint for what it allows."""
    backend = FakeBackend(reply=saying("yes", then=256), max_model_len=512)
    async with serving(tmp_path, backend, operator=FolderOperator(tmp_path, "fake")) as api:
        phases = ("--phases", "examples,coverage,fuzzing", "--max-examples", "3", "--mode", mode)
        report = await fuzzed(api, tmp_path, *phases, left_out=f"{_NOT_ASKED}|{left_out}")
        found = re.search(r"(\d+) generated, (\d+) passed", report)
        assert found is not None and int(found[1]) >= FEWEST_CASES, report[-2000:]


async def fuzzed(api: Served, folder: Path, *options: str, left_out: str = _NOT_ASKED) -> str:
    """What schemathesis reports of a server that passes its checks."""
    program = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("st")),
        *("run", f"{api.url}/openapi.json", "--seed", "7", "--workers", "1", "--no-shrink", "--checks", CHECKS),
        *("--continue-on-failure", "--request-timeout", "20", "--suppress-health-check", "all", "--warnings", "off"),
        *("--exclude-path-regex", left_out, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(_PATIENCE_S):
            said, _ = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
    report = said.decode()
    assert program.returncode == 0, report[-8000:]
    return report


@pytest.mark.slow
@pytest.mark.timeout(560)
async def test_what_the_document_allows_is_refused_for_reasons_alone_that_it_cannot_say(tmp_path: Path) -> None:
    """Every text of the model begins with a token, so that no prompt is too short. Places whose answers are never a
    success say so in the document, and are left out."""
    backend = FakeBackend(reply=saying("yes", then=256), max_model_len=512)
    spec = fake_spec(write_fake_model(tmp_path, starts=True))
    async with serving(tmp_path, backend, operator=FolderOperator(tmp_path, "fake"), spec=spec) as api:
        never = never_done(await api.get("/openapi.json"))
        exchanges = tmp_path / "exchanges.har"
        left_out = [part for name in never for part in ("--exclude-operation-id", name)]
        reported = ("--report", "har", "--report-har-path", str(exchanges), *left_out)
        await fuzzed(api, tmp_path, "--phases", "fuzzing", "--max-examples", "20", "--mode", "positive", *reported)
    entries = json.loads(exchanges.read_text())["log"]["entries"]
    refusals = list(refused(entries))
    assert sum(entry["response"]["status"] == 200 for entry in entries) >= FEWEST_ACCEPTED
    explained = re.compile("|".join(EXPLAINED.values()))
    assert [refusal for refusal in refusals if not explained.search(refusal[1])] == []


def never_done(document: dict[str, Any]) -> list[str]:
    """The operations that have no 200."""
    methods = [operation for methods in document["paths"].values() for operation in methods.values()]
    return [operation["operationId"] for operation in methods if "200" not in operation["responses"]]


def refused(entries: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Where, the sentence, and the body, of what was refused for itself; another model's name may be unknown."""
    for entry in entries:
        if entry["response"]["status"] in (400, 413, 415, 422):
            answer = json.loads(entry["response"]["content"]["text"])
            told = answer.get("error", answer.get("detail"))
            sentence = told if isinstance(told, str) else told.get("message", told.get("msg"))
            asked = entry["request"]
            yield asked["url"], sentence, asked.get("postData", {}).get("text", "")[:1000]
