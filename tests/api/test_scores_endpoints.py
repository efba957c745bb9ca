"""/v1/rerank, /v2/rerank, /rerank, /v1/score and /score: the order of documents, the numbers, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from engine.backends.torch.backend import TorchBackend
from engine.config import EngineConfig, ModelSpec
from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend
from tests.fakes.model import EOS_ID, fake_spec, write_fake_model
from tests.fakes.tiny_models import make_tiny_model

QUERY = "the brown fox is quick"
DOCUMENTS = ["what a lazy dog did", "the brown fox is quick", "the brown fox is quick today", "papers"]
RERANKS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORES = ("/v1/score", "/score")


class Computing(TorchBackend):
    """The torch backend where a test's server expects one that can be held up."""

    gate = load_gate = None


@pytest.fixture
async def computing(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose model really computes."""
    spec = ModelSpec(path=make_tiny_model(tmp_path / "model"), name="tiny", threads=1, dtype="float32")
    config = EngineConfig(worker_host="thread")
    async with serving(tmp_path, cast(FakeBackend, Computing()), config=config, spec=spec) as api:
        yield api


async def cosines(api: Served, query: str, documents: list[str]) -> list[float]:
    """What numpy makes of the vectors that the server gives."""
    answer = await api.post("/v1/embeddings", input=[query, *documents])
    asked, *others = [np.array(each["embedding"]) for each in answer["data"]]
    return [float(asked @ other / np.linalg.norm(asked) / np.linalg.norm(other)) for other in others]


async def test_documents_come_in_the_order_of_the_cosines_of_their_vectors(computing: Served) -> None:
    wanted = await cosines(computing, QUERY, DOCUMENTS)
    answer = await computing.post("/v1/rerank", model="tiny", query=QUERY, documents=DOCUMENTS)
    assert [each["index"] for each in answer["results"]] == list(np.argsort(-np.array(wanted)))
    assert answer["results"][0]["index"] == 1
    scores = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert [scores[place] for place in range(4)] == pytest.approx(wanted, abs=1e-6)


async def test_pairs_are_scored_one_with_each_or_each_with_its_own(computing: Served) -> None:
    wanted = await cosines(computing, QUERY, DOCUMENTS)
    one = await computing.post("/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    each = await computing.post("/v1/score", text_1=[QUERY, *DOCUMENTS[1:]], text_2=DOCUMENTS)
    assert [score["score"] for score in one["data"]] == pytest.approx(wanted, abs=1e-6)
    assert [score["score"] for score in each["data"]] == pytest.approx([wanted[0], 1, 1, 1], abs=1e-6)


@pytest.mark.parametrize("path", RERANKS)
async def test_an_answer_has_what_clients_of_vllm_jina_and_cohere_read(api: Served, path: str) -> None:
    answer = await api.post(path, model="fake", query="ab", documents=["cde", {"text": "ab"}], user="me")
    assert answer.pop("id").startswith("rerank-")
    assert answer == {
        "model": "fake",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
        "results": [
            {"index": 1, "document": {"text": "ab", "multi_modal": None}, "relevance_score": 1.0},
            {"index": 0, "document": {"text": "cde", "multi_modal": None}, "relevance_score": 0.0},
        ],
    }


@pytest.mark.parametrize("path", SCORES)
async def test_scores_have_what_clients_of_vllm_read(api: Served, path: str) -> None:
    answer = await api.post(path, text_1="ab", text_2=["cde", "ab"])
    assert answer.pop("id").startswith("score-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "list",
        "model": "fake",
        "data": [
            {"index": 0, "object": "score", "score": 0.0},
            {"index": 1, "object": "score", "score": 1.0},
        ],
        "usage": {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0, "prompt_tokens_details": None},
    }


async def test_fewer_documents_are_returned_and_without_their_texts_where_requested(api: Served) -> None:
    answer = await api.post("/v1/rerank", query="b", documents=["a", "b", "c"], top_n=1, return_documents=False)
    assert answer["results"] == [{"index": 1, "relevance_score": 1.0}]
    for top_n in (99, 0, -1):
        every = await api.post("/v1/rerank", query="b", documents=["a", "b", "c"], top_n=top_n)
        assert len(every["results"]) == 3


@pytest.mark.parametrize(("first", "second"), [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
async def test_the_two_sides_of_a_score_have_other_names(api: Served, first: str, second: str) -> None:
    answer = await api.post("/score", **{first: "ab", second: "ab"})
    assert [each["score"] for each in answer["data"]] == [1.0]


async def test_long_texts_are_cut_where_requested_and_only_what_is_left_is_counted(api: Served) -> None:
    body: dict[str, Any] = {"query": "ab", "documents": ["abcdef", "xxabcd"]}
    cut = await api.post("/v1/rerank", **body, truncate_prompt_tokens=2)
    assert (cut["results"][0]["index"], cut["results"][0]["relevance_score"]) == (0, 1.0)
    assert cut["usage"]["prompt_tokens"] == 6
    end = await api.post("/v1/rerank", **{**body, "query": "cd"}, truncate_prompt_tokens=2, truncation_side="left")
    assert (end["results"][0]["index"], end["results"][0]["relevance_score"]) == (1, 1.0)
    documents = await api.post("/v1/rerank", query="abcdef", documents=["abcdefg"], max_tokens_per_doc=6)
    assert (documents["results"][0]["relevance_score"], documents["usage"]["prompt_tokens"]) == (1.0, 12)
    query = await api.post("/v1/rerank", query="abcdef", documents=["ab"], max_tokens_per_query=2)
    assert (query["results"][0]["relevance_score"], query["usage"]["prompt_tokens"]) == (1.0, 4)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": [{"content": [{"type": "text", "text": "b"}]}]}, "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -2}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "use_activation": False}, "use_activation"),
        ("/v1/rerank", {"query": "a", "documents": ["b" * 5000]}, "documents"),
        ("/v1/rerank", {"query": "b" * 5000, "documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2048}, "documents"),
        ("/v1/score", {"text_2": "a"}, "text_1"),
        ("/v1/score", {"data_1": ["a", ""], "data_2": "b"}, "data_1[1]"),
        ("/v1/score", {"queries": "a", "items": [3]}, "items[0]"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "queries"),
    ],
)
async def test_a_bad_value_is_refused_by_its_field(api: Served, path: str, body: dict[str, Any], param: str) -> None:
    assert (await api.refusal(path, **body))["param"] == param


async def test_an_empty_query_is_named_as_it_was_sent(api: Served) -> None:
    assert (await api.refusal("/v1/rerank", query="", documents=["b"]))["message"] == "query is empty"


async def test_vectors_share_the_prefix_cache_with_requests_of_their_salt(api: Served) -> None:
    await api.post("/v1/embeddings", input="a", cache_salt="pepper")
    await api.post("/v1/rerank", query="a", documents="b", cache_salt="pepper")
    await api.post("/v1/embeddings", input="a")
    salted = [request.cache_scope.endswith("pepper") for request in api.backend.submitted]
    assert salted == [True, True, True, False]


@pytest.mark.parametrize("path", [*RERANKS, *SCORES])
async def test_a_model_that_makes_no_vectors_says_so_as_for_embeddings(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, FakeBackend(embeds=False)) as api:
        texts = {"query": "a", "documents": ["b"]} if "rerank" in path else {"text_1": "a", "text_2": "b"}
        refused = await api.refusal(path, **texts)
        assert refused == await api.refusal("/v1/embeddings", input="a")


async def test_special_tokens_stay_around_a_text_that_is_cut(tmp_path: Path) -> None:
    spec = fake_spec(write_fake_model(tmp_path, starts=True))
    async with serving(tmp_path, spec=spec) as api:
        await api.post("/v1/embeddings", input="abcdef", truncate_prompt_tokens=3)
        await api.post("/v1/completions", prompt="abcdef", truncate_prompt_tokens=3, max_tokens=1)
        prompts = [list(request.prompt_ids) for request in api.backend.submitted]
    assert prompts == [[EOS_ID, *b"ab"], [EOS_ID, *b"ef"]]
