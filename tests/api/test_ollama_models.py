"""Ollama's dialect: what its clients ask of models, and the vectors that they make of texts."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from console.api.requests.embedding import encode_vectors
from engine.config import ModelSpec
from engine.engine import LoadOrder
from engine.models.gguf import header
from tests.api.harness import Served, serving
from tests.api.ollama_calls import generate, refusal
from tests.fakes.backend import HIDDEN_SIZE, FakeBackend, vector_of
from tests.fakes.gguf_headers import WHOLE
from tests.fakes.model import write_fake_model


async def test_models_are_listed_with_a_tag(api: Served) -> None:
    [model] = (await api.get("/api/tags"))["models"]
    assert model["name"] == model["model"] == "fake:latest"
    assert (model["size"], len(model["digest"])) == (4000, 64)
    assert model["details"]["family"] == "llama"
    assert model["details"]["format"] == "safetensors"
    assert (await generate(api, model=model["name"], options={"num_predict": 1}))["done"]


class OneFile:
    """Loadable: a GGUF file under two names."""

    def __init__(self, file: Path) -> None:
        self._spec = ModelSpec(name="small", path=file, aliases=("tiny",))

    async def find(self, name: str) -> LoadOrder | None:
        return LoadOrder(spec=self._spec, knobs={}) if name in ("small", "tiny") else None

    async def listed(self) -> list[ModelSpec]:
        return [self._spec]


async def test_a_gguf_file_is_listed_by_all_of_its_names_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "small.gguf"
    file.write_bytes(WHOLE)
    opened: list[Path] = []

    def open_file(path: Path) -> Any:
        opened.append(path)
        return path.open("rb")

    monkeypatch.setattr(header, "open_file", open_file)
    async with serving(write_fake_model(tmp_path / "m"), loadable=OneFile(file)) as api:
        models = {model["name"]: model for model in (await api.get("/api/tags"))["models"]}
    assert models.keys() == {"fake:latest", "small:latest", "tiny:latest"}
    small, tiny = models["small:latest"], models["tiny:latest"]
    assert (small["details"]["family"], small["details"]["format"]) == ("llama", "gguf")
    assert tiny == small | {"name": "tiny:latest", "model": "tiny:latest"}
    assert opened == [file]


async def test_a_model_shows_what_its_folder_says(tmp_path: Path) -> None:
    folder = write_fake_model(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 256, "temperature": 0.6}))
    async with serving(folder) as api:
        shown = await api.post("/api/show", model="fake", verbose=True)
        assert await api.post("/api/show", name="fake:latest") == shown | {
            "modelfile": shown["modelfile"].replace("fake", "fake:latest")
        }
        assert "available: fake" in await refusal(api, "/api/show", 404, model="other")
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] == 4096
    assert shown["model_info"]["llama.attention.head_count_kv"] == 2
    assert shown["parameters"] == "temperature 0.6"
    assert "message['content']" in shown["template"]
    assert "completion" in shown["capabilities"]
    assert str(tmp_path) not in json.dumps(shown)


async def test_models_in_memory_are_told(api: Served) -> None:
    [model] = (await api.get("/api/ps"))["models"]
    assert (model["name"], model["context_length"], model["size_vram"]) == ("fake:latest", 4096, 0)
    assert model["expires_at"] == "9999-12-31T23:59:59Z"


async def test_clients_that_look_whether_it_is_there_find_it(api: Served) -> None:
    assert (await api.get("/api/version"))["version"]
    async with api.http.head("/") as response:
        assert response.status == 200


@pytest.mark.parametrize("path", ["/api/pull", "/api/push", "/api/create", "/api/copy", "/api/blobs/sha256:00"])
async def test_what_only_ollama_does_is_refused_in_a_sentence(api: Served, path: str) -> None:
    assert f"{path} is not supported: " in await refusal(api, path, model="x")


async def test_deleting_models_is_refused(api: Served) -> None:
    async with api.http.delete("/api/delete", json={"model": "fake"}) as response:
        assert response.status == 400
        assert "models cannot be deleted" in (await response.json())["error"]


async def test_texts_become_vectors(api: Served) -> None:
    answer = await api.post("/api/embed", model="fake", input=["ab", "c"], dimensions=HIDDEN_SIZE)
    assert answer["embeddings"] == [vector_of(b"ab"), vector_of(b"c")]
    assert (answer["model"], answer["prompt_eval_count"]) == ("fake", 3)
    assert answer["total_duration"] >= answer["load_duration"] >= 0
    assert (await api.post("/api/embed", input="ab"))["embeddings"] == [vector_of(b"ab")]
    assert (await api.post("/api/embeddings", prompt="ab"))["embedding"] == vector_of(b"ab")
    assert (await api.post("/api/embed", input=[]))["embeddings"] == []
    assert (await api.post("/api/embeddings"))["embedding"] == []


async def test_of_a_text_that_is_too_long_the_beginning_is_embedded_unless_truncate_is_false(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(max_model_len=40)) as api:
        assert (await api.post("/api/embed", input="x" * 1000))["embeddings"] == [vector_of(b"x" * 39)]
        assert (await api.post("/api/embed", input="xyz", options={"num_ctx": 3}))["embeddings"] == [vector_of(b"xy")]
        assert "input" in await refusal(api, "/api/embed", input="x" * 1000, truncate=False)


async def test_vectors_are_written_one_at_a_time() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    written = await encode_vectors([array("f", [0.5, 1.0]).tobytes()] * 20, "float")
    counting.cancel()
    assert [bytes(vector) for vector in written] == [b"[0.5,1.0]"] * 20
    assert turns >= 20
