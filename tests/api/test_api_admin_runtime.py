"""Orders over HTTP at the real runtime: names and paths to models, settings of a load, adapters, estimates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from console.runtime.runtime import Runtime
from console.settings.schema import Settings
from tests.fakes.adapters import make_adapter
from tests.fakes.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`models` holds tiny, other, an adapter and a link to `linked`; `elsewhere` holds what is not to be touched."""
    root = tmp_path_factory.mktemp("operator")
    for name in ("models/tiny", "models/other", "elsewhere/secret", "linked"):
        make_tiny_model(root / name)
    (root / "models/link").symlink_to(root / "linked")
    make_adapter(root / "models/poet-v1", root / "models/tiny")
    make_adapter(root / "elsewhere/spy", root / "models/tiny")
    return root


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late a refusal comes, it is the answer to the load."""
    monkeypatch.setattr("console.api.admin.endpoints._REFUSAL_S", 60.0)


class Operated:
    """A runtime and a client of its server."""

    def __init__(self, runtime: Runtime, http: aiohttp.ClientSession) -> None:
        self.runtime = runtime
        self._http = http

    async def post(self, path: str, /, status: int = 200, **body: Any) -> dict[str, Any]:
        """The JSON answer to a POST."""
        async with self._http.post(path, json=body) as response:
            answer = await response.json()
            assert response.status == status, answer
            return dict(answer)

    async def refusal(self, path: str, /, status: int = 400, **body: Any) -> str:
        """The sentence of a POST that must be refused."""
        return str((await self.post(path, status, **body))["error"]["message"])

    async def load(self, **order: Any) -> None:
        """Load a model, to the end."""
        report = await self.ended(**order)
        assert report.get("state") == "ready", report

    async def ended(self, **order: Any) -> dict[str, Any]:
        """The report of a load that has ended, however it did."""
        async with self._http.post("/admin/load", json=order) as response:
            report = await response.json()
        while report.get("state") == "loading":
            async with self._http.get("/admin/load") as response:
                report = await response.json()
        return dict(report)

    def models(self) -> dict[str, Any]:
        """What is shown of each model, by name."""
        return {model.name: model for model in self.runtime.engine.publish().models}


@asynccontextmanager
async def operated(folders: Path, **fields: Any) -> AsyncIterator[Operated]:
    """A runtime that may take models from `models`; nothing is loaded."""
    settings = Settings(port=0, models_dir=(folders / "models",), worker_host="thread", **fields)
    runtime = Runtime(settings)
    await runtime.start()
    try:
        async with aiohttp.ClientSession(runtime.api_status().url) as http:
            yield Operated(runtime, http)
    finally:
        await runtime.close(drain_s=0.0)


async def test_models_are_loaded_by_name_with_settings_of_their_own_and_changed_the_same_way(folders: Path) -> None:
    async with operated(folders, max_prompts=3) as api:
        await api.load(model="tiny", max_model_len=128)
        await api.runtime.engine.reconfigure(max_prompts=2)
        assert api.models()["tiny"].status.model.max_model_len == 128
        await api.load(model="other", beside=True)
        assert api.models()["other"].max_prompts == 2
        await api.load(model="tiny", max_model_len=64)
        ready = [model for model in api.runtime.engine.publish().models if model.status.state == "ready"]
        assert {model.name: model.status.model.max_model_len for model in ready if model.status.model} == {
            "other": 512,
            "tiny": 64,
        }


async def test_who_cannot_name_a_model_gets_a_number_to_a_name_that_is_taken(folders: Path) -> None:
    async with operated(folders) as api:
        for _ in range(3):
            await api.runtime.load("tiny", beside=True, renames=True)
        assert list(api.models()) == ["tiny", "tiny-2", "tiny-3"]


async def test_a_folder_may_be_loaded_beside_itself_under_another_name(folders: Path) -> None:
    async with operated(folders) as api:
        await api.load(model="tiny")
        await api.load(model="tiny", name="small", beside=True, max_model_len=32)
        assert {name: model.status.model.max_model_len for name, model in api.models().items()} == {
            "tiny": 512,
            "small": 32,
        }


@pytest.mark.parametrize(
    "path",
    ["elsewhere/secret", "models/../elsewhere/secret", "nowhere", "", "models/../nowhere"],
    ids=["a folder", "a step up", "no folder", "the root of ours", "no folder by a step up"],
)
async def test_a_path_outside_our_folders_is_refused_whether_it_is_there_or_not(folders: Path, path: str) -> None:
    async with operated(folders) as api:
        for order in ("/admin/load", "/admin/estimate"):
            said = await api.refusal(order, model=f"{folders}/{path}")
            assert "is in none of the models folders" in said
        assert api.models() == {}


async def test_a_folder_beneath_the_working_one_is_no_model_of_ours(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders / "elsewhere")
    async with operated(folders) as api:
        for name in ("secret", "./secret", "../elsewhere/secret"):
            assert "is in none of the models folders" in await api.refusal("/admin/load", model=name)


async def test_paths_inside_our_folders_are_taken_links_there_included(folders: Path) -> None:
    async with operated(folders) as api:
        for name in ("models/tiny", "models/link"):
            found = await api.post("/admin/estimate", model=f"{folders}/{name}")
            assert found["can_load"] is True


@pytest.mark.parametrize("name", ["models/link/../../elsewhere/secret", "models/./../elsewhere/secret"])
async def test_no_step_up_leads_out_by_a_link_neither(folders: Path, name: str) -> None:
    async with operated(folders) as api:
        for path in (f"{folders}/{name}", f"../{name}", f"~/{name}"):
            assert "is in none of the models folders" in await api.refusal("/admin/load", model=path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
async def test_a_folder_of_pickles_is_refused_by_their_name_and_none_is_opened(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path / "models/pickled")
    (folder / "model.safetensors").rename(folder / name)
    (folder / name).chmod(0)

    def unpickled(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was opened")

    for opener in ("pickle.load", "pickle.loads", "torch.load"):
        monkeypatch.setattr(opener, unpickled)
    async with operated(tmp_path) as api:
        said = await api.refusal("/admin/load", 400, model="pickled")
        assert name in said
        assert "pickle" in said
        assert api.models() == {}


async def test_a_load_that_is_refused_for_the_models_fault_is_an_alert_and_one_of_a_mistyped_name_is_none(
    tmp_path: Path,
) -> None:
    weights = make_tiny_model(tmp_path / "models/bad") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    async with operated(tmp_path) as api:
        assert "bad cannot be loaded" in await api.refusal("/admin/load", 400, model="bad")
        await api.refusal("/admin/load", 404, model="nothing-like-it")
        await api.refusal("/admin/load", 400, model="bad", max_prompts=0)
        snapshot = api.runtime.engine.publish()
        (alert,) = snapshot.alerts
        assert (alert.cause, alert.subject, alert.done) == ("load_failed", "bad", "Nothing was changed.")
        assert [(mark.kind, mark.text) for mark in snapshot.marks] == [("failure", "bad: load failed")]


async def test_the_model_of_the_start_may_be_loaded_again_wherever_it_lies(folders: Path) -> None:
    model = folders / "elsewhere/secret"
    async with operated(folders, model=str(model)) as api:
        assert (await api.post("/admin/estimate", model=str(model)))["fits"] is True
        await api.runtime.load(str(model))
        assert (await api.post("/admin/estimate", model="secret", workers=2))["workers"] == 2


async def test_an_unknown_model_is_a_404_with_what_there_is(folders: Path) -> None:
    async with operated(folders) as api:
        assert "other" in await api.refusal("/admin/load", 404, model="nothing-like-it")


async def test_a_setting_that_the_backend_lacks_is_refused(folders: Path) -> None:
    async with operated(folders) as api:
        assert "cache_bits" in await api.refusal("/admin/load", model="tiny", cache_bits=6)
        assert "max_model_len" in await api.refusal("/admin/load", model="tiny", max_model_len=10**6)


async def test_weights_and_determinism_are_those_of_one_load_alone(folders: Path) -> None:
    async with operated(folders, devices="sim:1,1") as api:
        refused = await api.ended(model="tiny", weights="int8")
        assert "quantizes weights on a CPU only" in str(refused["error"])
        fixed = await api.ended(model="tiny", deterministic=True)  # refused where the native kernels cannot run
        if fixed["state"] == "ready":
            assert api.models()["tiny"].status.spec.deterministic is True
        else:
            assert "deterministic" in str(fixed["error"])
        await api.load(model="tiny")
        plain = api.models()["tiny"].status.spec
        assert (plain.weights, plain.deterministic) == ("auto", False)


async def test_an_estimate_is_a_table_and_a_verdict_before_anything_is_loaded(folders: Path) -> None:
    async with operated(folders, devices="sim:1,1") as api:
        found = await api.post("/admin/estimate", model="tiny", workers=3, max_prompts=4)
        assert (found["can_load"], found["workers"], found["max_prompts"]) == (True, 3, 4)
        assert [device["id"] for device in found["devices"]] == ["sim:0", "sim:1", "cpu"]
        assert found["verdict"]
        assert api.models() == {}


async def test_adapters_are_attached_by_their_found_name_or_folder_and_used(folders: Path) -> None:
    async with operated(folders) as api:
        await api.runtime.load("tiny")
        plain = await api.post("/v1/completions", prompt="a b", max_tokens=8, temperature=0)
        await api.post("/admin/adapters", name="poet", path="poet-v1")
        await api.post("/admin/adapters", name="bard", path=str(folders / "models/poet-v1"), scale=2.0)
        for field in ("model", "lora"):
            adapted = await api.post("/v1/completions", prompt="a b", max_tokens=8, temperature=0, **{field: "poet"})
            assert adapted["choices"][0]["text"] != plain["choices"][0]["text"]
        assert [each.name for each in api.models()["tiny"].adapters] == ["poet", "bard"]


async def test_an_adapter_outside_our_folders_or_that_is_none_is_refused(folders: Path) -> None:
    async with operated(folders) as api:
        await api.runtime.load("tiny")
        said = await api.refusal("/admin/adapters", name="spy", path=str(folders / "elsewhere/spy"))
        assert "is in none of the models folders" in said
        said = await api.refusal("/admin/adapters", name="tiny2", path=str(folders / "models/tiny"))
        assert "adapter_config.json" in said
        assert api.models()["tiny"].adapters == ()


async def test_a_name_that_no_file_can_have_is_no_models(folders: Path) -> None:
    async with operated(folders) as api:
        for path in ("/admin/load", "/admin/estimate"):
            said = await api.refusal(path, 404, model="x" * 4000)
            assert said.startswith("no model is called xxxx") and len(said) < 1000


async def test_folders_among_the_options_of_a_load_must_be_open_to_others(folders: Path) -> None:
    async with operated(folders) as api:
        for path, body in (
            ("/admin/load", {}),
            ("/admin/estimate", {}),
            ("/admin/call/models.load", {"changes": {}}),
            ("/admin/call/models.estimate", {"changes": {}}),
        ):
            for option, folder in (("lora", "elsewhere/spy"), ("draft_model", "elsewhere/secret")):
                named = {option: str(folders / folder)}
                order = {"model": "tiny", **({"changes": named} if "changes" in body else named)}
                assert "is in none of the models folders" in await api.refusal(path, **order)
        await api.load(model="tiny", lora="poet-v1", num_workers=1)
        spec = api.models()["tiny"].status.spec
        assert spec.lora == folders / "models/poet-v1"
