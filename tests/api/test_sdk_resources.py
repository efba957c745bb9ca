"""The tests that the openai and anthropic SDKs have of their own resources, against this server.

They are written for a mock of the whole API: they set every optional parameter at once, to examples. What is missed is
explained below.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.config import ModelSpec
from tests.api.harness import Served, serving
from tests.api.published_suites import Miss, Outcome, contradictions, outcomes
from tests.api.test_llm_comply import hello_or_call
from tests.fakes.backend import FakeBackend
from tests.fakes.engines import Backends
from tests.fakes.published_sources import sdk_source, source_folder
from tests.fakes.tool_templates import HERMES, write_tool_model

pytestmark = pytest.mark.long

FAKES = Path(__file__).parents[1] / "fakes"
MODELS = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "text-embedding-3-small", "claude-opus-5-5", "model_id")
"""The names that the tests ask for."""
CALL = "test_(method|raw_response|streaming_response)_"
NO_INPUT = Miss(
    "input is left out, and so is all that could stand for it: there is nothing to answer",
    "400 - input is missing",
    f"{CALL}(create_overload_[12]|count)",
)
NOT_STORED = Miss(
    "the examples name a response that nobody asked for, and only what was answered is stored",
    "404 - response_id 'resp_.*' is not stored here",
    f"{CALL}(retrieve.*_overload_1|delete|cancel)",
)
ALL_AT_ONCE = "test_method_create_with_all_params_overload_[12]"
OTHER_PAGE = Miss(
    "the examples page from models that do not exist",
    "400 .* is not a model of this",
    "test_method_list_with_all_params",
)
MISSES: Mapping[str, Mapping[str, Sequence[Miss]]] = {
    "openai": {
        "test_responses": (
            NO_INPUT,
            Miss(
                "all parameters at once include programs of OpenAI's",
                "400 - access_programs is not a field",
                ALL_AT_ONCE,
            ),
            NOT_STORED,
            Miss(
                "a stored response is read whole",
                "400 - stream is not supported",
                f"{CALL}retrieve.*_overload_2",
            ),
            Miss(
                "a conversation is never compacted here",
                "404 - Not found: /v1/responses/compact",
                f"{CALL}compact.*",
            ),
        ),
        "responses/test_input_items": (
            Miss("no response has the id response_id: they begin with resp_", "404 - Not found", f"{CALL}list.*"),
        ),
        "responses/test_input_tokens": (
            NO_INPUT,
            Miss(
                "conversations are not stored, responses are",
                "400 - conversation is not supported: use previous_response_id",
                "test_method_count_with_all_params",
            ),
        ),
        "chat/test_completions": (
            Miss("all parameters at once include sound", "400 - audio is not supported", ALL_AT_ONCE),
            Miss("chat completions are not stored", "404 - Not found", f"{CALL}(retrieve|update|delete)"),
            Miss(
                "chat completions are not stored",
                "405 - .* supports POST, not GET",
                f"{CALL}list(_with_all_params)?",
            ),
        ),
        "test_completions": (
            Miss("all parameters at once include the text after a gap", "400 - suffix is not supported", ALL_AT_ONCE),
        ),
        "test_embeddings": (
            Miss(
                "the vectors of a model have one length",
                "400 - dimensions is 1; this model's vectors have 64",
                "test_method_create_with_all_params",
            ),
            Miss(
                "without a format the client asks for base64, which its strict mode refuses before it is decoded",
                "Data returned by API invalid for expected schema",
                f"{CALL}create",
                "strict|aiohttp",
            ),
        ),
        "test_models": (Miss("models are unloaded at /admin, by operators", "405 - .* not DELETE", f"{CALL}delete"),),
    },
    "anthropic": {
        "test_messages": (
            Miss("all parameters at once include a container", "400 .*'container is not supported", ALL_AT_ONCE),
            Miss(
                "all parameters at once include a tool that is told of later",
                "400 .*defer_loading is not supported",
                "test_method_count_tokens_with_all_params",
            ),
            Miss("the name of each old model is asked", "404 .*There is no model", "test_deprecated_model_warning"),
        ),
        "test_models": (OTHER_PAGE,),
        "beta/test_messages": (
            Miss(
                "all parameters at once include how Anthropic bills",
                "400 .*billing_policy is not a field",
                f"{ALL_AT_ONCE}|test_method_count_tokens_with_all_params",
            ),
        ),
        "beta/test_models": (OTHER_PAGE,),
    },
}
"""By SDK and file: what is not passed, and why."""


@asynccontextmanager
async def serving_models(folder: Path) -> AsyncIterator[Served]:
    """A server with a model by each of the names, which greets in a few words."""
    write_tool_model(folder, HERMES)
    first, *others = [ModelSpec(path=folder, name=name) for name in MODELS]
    backends = [FakeBackend(reply=hello_or_call) for _ in MODELS]
    async with serving(folder, backends[0], spec=first, others=Backends(*backends[1:])) as api:
        for spec in others:
            await api.engine.load(spec, beside=True)
        yield api


async def ended(api: Served, folder: Path, sdk: str) -> list[Outcome]:
    """How the tests of an SDK ended, and ours that are held to its types."""
    sources = source_folder(sdk_source(sdk))
    plugin = Path(shutil.copy(FAKES / "sdk_clients.py", folder))
    ours = shutil.copy(FAKES / f"{sdk}_answers.py", folder / "test_answers.py")
    return await outcomes(
        folder,
        ["-p", plugin.stem, *(f"tests/api_resources/{file}.py" for file in MISSES[sdk]), str(ours)],
        rootdir=sources,
        path=[sources, folder],
        variables={"SDK": sdk, "TEST_API_BASE_URL": f"{api.url}/v1" if sdk == "openai" else api.url},
    )


def module_of(file: str) -> str:
    """The dotted name of a file of tests."""
    return f"tests.api_resources.{file.replace('/', '.')}"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("sdk", "least_passed"), [("openai", 155), ("anthropic", 173)])
async def test_every_miss_is_explained(tmp_path: Path, sdk: str, least_passed: int) -> None:
    async with serving_models(tmp_path / "model") as api:
        results = await ended(api, tmp_path, sdk)
    found = {
        file: contradictions([each for each in results if each.module == module_of(file)], misses)
        for file, misses in MISSES[sdk].items()
    }
    assert {file: sentences for file, sentences in found.items() if sentences} == {}
    ours = [each for each in results if each.module not in map(module_of, MISSES[sdk])]
    assert ours
    assert [each for each in ours if each.status != "passed"] == []
    assert sum(each.status == "passed" for each in results) >= least_passed
