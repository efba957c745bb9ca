"""LoRA adapters on the torch backend: beside the weights they give what they give inside them, in any company."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.backends.base import BackendRequest
from engine.backends.torch.backend import TorchBackend
from engine.config import AdapterSpec, CacheBits, DeviceShare, ModelSpec, SamplingParams
from engine.errors import InsufficientMemory, InvalidRequest, UnsupportedModel, WorkerFailed
from engine.models.adapters import version_of
from tests.fakes.adapters import ATTENTION, MLP, MadeAdapter, make_adapter, merge_by_hand
from tests.fakes.oracle import Driver, load_runner
from tests.fakes.tiny_models import ARCHITECTURES, make_tiny_model
from tests.integration.torch_backend.running import Run, load, load_spec, prompt

GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(seed=11, temperature=1.2, top_p=0.95, repetition_penalty=1.1)
PARAMS = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
STEPS = 48


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), with_tokenizer=False)


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, MadeAdapter]:
    """Three that differ in seed, rank and in what they adapt."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "all": make_adapter(folder / "all", llama, seed=1),
        "attention": make_adapter(folder / "attention", llama, seed=2, rank=3, targets=ATTENTION),
        "few": make_adapter(folder / "few", llama, seed=3, rank=8, alpha=4, targets=("v_proj", "up_proj"), layers=[1]),
    }


def spec(name: str, adapter: MadeAdapter, scale: float = 1.0) -> AdapterSpec:
    return AdapterSpec(name=name, path=adapter.folder, scale=scale)


def with_adapters(model: Path, adapters: dict[str, MadeAdapter], **settings: Any) -> TorchBackend:
    backend = load(model, **settings)
    for name, adapter in adapters.items():
        backend.attach(spec(name, adapter))
    return backend


def ask(
    name: str, tokens: list[int], adapter: str = "", params: SamplingParams = GREEDY, generated: Sequence[int] = ()
) -> BackendRequest:
    return BackendRequest(id=name, prompt_ids=tokens, params=params, generated=list(generated), adapter=adapter)


def assert_equals_merged(model: Path, adapter: MadeAdapter, folder: Path, *, scale: float = 1.0) -> None:
    """Logits at every position and a whole greedy answer, from the adapter beside the weights and from --lora, are
    those of the model with the adapter merged by hand; and they are not the model's own."""
    ours = load_runner(model)
    ours.adapters.attach(spec("it", adapter, scale))
    merged = Driver(load_runner(merge_by_hand(model, adapter, folder, scale)))
    plain, beside = Driver(load_runner(model)), Driver(ours)
    drivers = {"merged": merged, "beside": beside, "plain": plain}
    if scale == 1.0:
        drivers["inside"] = Driver(load_runner(model, lora=adapter.folder))
    runs = {}
    for name, driver in drivers.items():
        runs[name] = driver.add(prompt(5, 30), adapter="it" if name == "beside" else "")
        for length in (1, 7, 22):
            driver.feed((runs[name], length))
        runs[name].tokens.append(int(runs[name].logits[-1].argmax()))
        driver.greedy([runs[name]], STEPS)
    expected = runs.pop("merged")
    own = runs.pop("plain")
    assert own.tokens != expected.tokens
    for run in runs.values():
        assert run.tokens == expected.tokens
        torch.testing.assert_close(torch.stack(run.logits), torch.stack(expected.logits), atol=2e-4, rtol=1e-4)


# --- equal to merged weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_adapter_computes_what_merged_weights_compute(tmp_path: Path, architecture: str) -> None:
    model = make_tiny_model(tmp_path / "model", architecture, with_tokenizer=False)
    assert_equals_merged(model, make_adapter(tmp_path / "adapter", model), tmp_path / "merged")


@pytest.mark.parametrize("target", [*ATTENTION, *MLP])
def test_each_projection_may_be_the_only_one_adapted(llama: Path, tmp_path: Path, target: str) -> None:
    adapter = make_adapter(tmp_path / "adapter", llama, targets=(target,))
    assert_equals_merged(llama, adapter, tmp_path / "merged")


def test_a_rank_stabilised_adapter_is_scaled_by_the_root_of_its_rank(llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(
        tmp_path / "adapter", llama, rank=9, alpha=6, use_rslora=True, scale_of=lambda module: 6 / 9**0.5
    )
    assert_equals_merged(llama, adapter, tmp_path / "merged")


def test_patterns_give_modules_ranks_and_alphas_of_their_own(llama: Path, tmp_path: Path) -> None:
    ranks = {"q_proj": 2, r"layers\.1\.mlp\..*": 6}
    alphas = {"model.layers.0.self_attn.v_proj": 3.0}

    def rank_of(module: str) -> int:
        return 2 if module.endswith(".q_proj") else 6 if module.startswith("model.layers.1.mlp") else 4

    def scale_of(module: str) -> float:
        return (3.0 if module == "model.layers.0.self_attn.v_proj" else 8.0) / rank_of(module)

    adapter = make_adapter(
        tmp_path / "adapter", llama, rank_of=rank_of, scale_of=scale_of, rank_pattern=ranks, alpha_pattern=alphas
    )
    assert_equals_merged(llama, adapter, tmp_path / "merged")


@pytest.mark.parametrize("layers", [[0], 1])
def test_an_adapter_of_some_layers_leaves_the_others_alone(llama: Path, tmp_path: Path, layers: Any) -> None:
    chosen = layers if isinstance(layers, list) else [layers]
    adapter = make_adapter(tmp_path / "adapter", llama, layers=chosen, layers_to_transform=layers)
    assert_equals_merged(llama, adapter, tmp_path / "merged")


def test_the_scale_of_the_attachment_multiplies_the_adapters_own(llama: Path, tmp_path: Path) -> None:
    assert_equals_merged(llama, make_adapter(tmp_path / "adapter", llama), tmp_path / "merged", scale=0.4)


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_of_any_float_and_under_either_name_are_read(
    llama: Path, tmp_path: Path, dtype: torch.dtype, prefix: str
) -> None:
    adapter = make_adapter(tmp_path / "adapter", llama, dtype=dtype, prefix=prefix)
    assert_equals_merged(llama, adapter, tmp_path / "merged")


def test_an_adapter_of_bfloat16_weights_stays_close_to_merged_ones(llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", llama)
    runner = load_runner(llama, dtype="bfloat16")
    runner.adapters.attach(spec("it", adapter))
    exact = Driver(load_runner(merge_by_hand(llama, adapter, tmp_path / "merged")))
    ours = Driver(runner)
    found = ours.feed((ours.add(prompt(5), adapter="it"), None))[0]
    expected = exact.feed((exact.add(prompt(5)), None))[0]
    assert torch.nn.functional.cosine_similarity(found, expected, dim=0) > 0.99


# --- many in one batch ----------------------------------------------------------------------------------------------


@PARAMS
def test_requests_of_several_adapters_and_of_none_get_what_they_get_alone(
    llama: Path, adapters: dict[str, MadeAdapter], params: SamplingParams
) -> None:
    names = ["all", "", "attention", "few", "", "all", "few"]
    requests = [ask(str(n), prompt(n % 3, 5 + 7 * (n % 4)), name, params) for n, name in enumerate(names)]
    together = Run(with_adapters(llama, adapters), *requests).to_end()
    alone = {each.id: Run(with_adapters(llama, adapters), each).to_end()[each.id] for each in requests}
    assert together == alone


@PARAMS
def test_chunks_and_preemption_change_nothing_under_adapters(
    llama: Path, adapters: dict[str, MadeAdapter], params: SamplingParams
) -> None:
    names = ["all", "", "attention", "few"]
    requests = [ask(str(n), prompt(n, 20), name, params) for n, name in enumerate(names)]
    crowded = with_adapters(llama, adapters, kv_tokens=112, step_tokens=16)
    tokens = Run(crowded, *requests).to_end()
    assert crowded.stats().preemptions > 0
    assert tokens == {each.id: Run(with_adapters(llama, adapters), each).to_end()[each.id] for each in requests}


@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_side_by_side_over_few_bits_give_what_they_give_alone(
    llama: Path, adapters: dict[str, MadeAdapter], bits: CacheBits
) -> None:
    requests = [ask(str(n), prompt(n % 2, 12 + 7 * n), name) for n, name in enumerate(("all", "", "few"))]
    together = Run(with_adapters(llama, adapters, cache_bits=bits), *requests).to_end()
    for each in requests:
        assert Run(with_adapters(llama, adapters, cache_bits=bits), each).to_end()[each.id] == together[each.id]


def test_pages_computed_with_one_adapter_are_no_prefix_for_another(
    llama: Path, adapters: dict[str, MadeAdapter]
) -> None:
    expected = {
        name: Run(with_adapters(llama, adapters), ask("r", prompt(1, 45), name)).to_end() for name in ("", "all", "few")
    }
    backend = with_adapters(llama, adapters)
    for name, cached in (("", 0), ("all", 0), ("few", 0), ("all", 40), ("", 40)):
        run = Run(backend, ask("r", prompt(1, 45), name))
        assert run.to_end() == expected[name]
        assert run.cached == {"r": cached}


# --- coming and going -----------------------------------------------------------------------------------------------


def test_an_adapter_may_come_and_go_in_the_middle_of_answers(llama: Path, adapters: dict[str, MadeAdapter]) -> None:
    backend = load(llama)
    plain = ask("plain", prompt(1))
    run = Run(backend, plain)
    run.step()
    assert backend.attach(spec("it", adapters["all"])) == 49152
    adapted = ask("adapted", prompt(2), "it")
    run.add(adapted)
    run.step()
    backend.detach("it")
    with pytest.raises(InvalidRequest, match="no adapter it is attached; attached: none"):
        backend.submit(ask("late", prompt(3), "it"))
    tokens = run.to_end()
    assert tokens["plain"] == Run(load(llama), plain).to_end()["plain"]
    assert tokens["adapted"] == Run(with_adapters(llama, {"it": adapters["all"]}), adapted).to_end()["adapted"]


def test_a_detached_adapters_memory_is_free_once_its_last_request_has_ended(
    llama: Path, adapters: dict[str, MadeAdapter]
) -> None:
    backend = with_adapters(llama, {"it": adapters["all"]})
    weights_bytes = backend.stats().weights_bytes
    run = Run(backend, ask("r", prompt(1), "it"))
    run.step()
    backend.detach("it")
    backend.detach("never there")
    gc.collect()
    assert backend.stats().weights_bytes == weights_bytes
    run.to_end()
    gc.collect()
    assert backend.stats().weights_bytes == weights_bytes - 49152


def test_another_adapter_under_the_same_name_is_for_new_requests_and_finds_no_old_pages(
    llama: Path, adapters: dict[str, MadeAdapter]
) -> None:
    backend = with_adapters(llama, {"it": adapters["all"]})
    old, new = ask("old", prompt(1, 45), "it"), ask("new", prompt(1, 45), "it")
    run = Run(backend, old)
    run.step()
    backend.attach(spec("it", adapters["few"]))
    run.add(new)
    tokens = run.to_end()
    assert run.cached == {"old": 0, "new": 0}
    for request, name in ((old, "all"), (new, "few")):
        expected = Run(with_adapters(llama, {"it": adapters[name]}), request).to_end()[request.id]
        assert tokens[request.id] == expected
    backend.attach(spec("it", adapters["all"]))
    again = Run(backend, ask("again", prompt(1, 45), "it"))
    assert again.to_end()["again"] == tokens["old"]
    assert again.cached == {"again": 40}


def test_versions_of_one_name_are_there_side_by_side_each_for_the_requests_that_began_with_it(
    llama: Path, adapters: dict[str, MadeAdapter]
) -> None:
    backend = load(llama)
    versions = [
        msgspec.structs.replace(each, version=version_of(each))
        for each in (spec("it", adapters["all"]), spec("it", adapters["few"]))
    ]
    for each in versions:
        backend.attach(each)
    for each, name in zip(versions, ("all", "few"), strict=True):
        expected = Run(with_adapters(llama, {"it": adapters[name]}), ask("r", prompt(1, 45), "it")).to_end()
        resumed = ask("r", prompt(1, 45), each.key, generated=expected["r"][:9])
        assert Run(backend, resumed).to_end() == expected


def test_a_version_whose_files_have_changed_is_refused_and_its_requests_are_given_the_reason(
    llama: Path, tmp_path: Path
) -> None:
    made = spec("it", make_adapter(tmp_path / "it", llama))
    made = msgspec.structs.replace(made, version=version_of(made))
    make_adapter(tmp_path / "it", llama, seed=8)
    backend = load(llama)
    with pytest.raises(UnsupportedModel, match="have changed since the adapter was attached"):
        backend.attach(made)
    with pytest.raises(WorkerFailed, match=r"adapter it could not be attached: the files in .* have changed"):
        backend.submit(ask("r", prompt(1), made.key))


def test_attaching_what_is_attached_loads_nothing_again(llama: Path, adapters: dict[str, MadeAdapter]) -> None:
    runner = load_runner(llama)
    first = weakref.ref(runner.adapters.attach(spec("it", adapters["all"])))
    assert runner.adapters.attach(spec("it", adapters["all"])) is first()
    assert runner.adapters.attach(spec("it", adapters["all"], scale=2.0)) is not first()


def test_a_request_resumed_elsewhere_goes_on_under_its_adapter(llama: Path, adapters: dict[str, MadeAdapter]) -> None:
    whole = Run(with_adapters(llama, adapters), ask("r", prompt(3), "all", SEEDED)).to_end()["r"]
    resumed = ask("r", prompt(3), "all", SEEDED, generated=whole[:9])
    assert Run(with_adapters(llama, adapters), resumed).to_end()["r"] == whole


def test_an_unknown_adapter_is_refused_with_the_names_there_are(llama: Path, adapters: dict[str, MadeAdapter]) -> None:
    backend = with_adapters(llama, adapters)
    with pytest.raises(InvalidRequest, match="no adapter other is attached; attached: all, attention, few") as refused:
        backend.submit(ask("r", prompt(1), "other"))
    assert refused.value.details["param"] == "adapter"
    assert not backend.has_work()


def test_an_adapter_that_does_not_fit_leaves_everything_as_it_was(
    llama: Path, adapters: dict[str, MadeAdapter], tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", hidden_size=128, with_tokenizer=False)
    misfit = make_adapter(tmp_path / "misfit", other)
    backend = with_adapters(llama, {"it": adapters["all"]})
    before = backend.stats().weights_bytes
    with pytest.raises(UnsupportedModel, match="down_proj is for a weight of 128 x 128; this model's is 64 x 128"):
        backend.attach(spec("it", misfit))
    assert backend.stats().weights_bytes == before
    request = ask("r", prompt(2), "it")
    expected = Run(with_adapters(llama, {"it": adapters["all"]}), request).to_end()
    assert Run(backend, request).to_end() == expected


def test_no_adapter_of_another_model_is_read_whole_while_requests_wait(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = make_tiny_model(tmp_path / "wider", hidden_size=128, with_tokenizer=False)
    misfit = make_adapter(tmp_path / "misfit", wider)
    backend = load(llama)
    monkeypatch.setattr(
        "engine.backends.torch.weights.adapters.version_of", lambda spec: pytest.fail("every byte was read")
    )
    with pytest.raises(UnsupportedModel, match="this model's is"):
        backend.attach(spec("misfit", misfit))
    backend.unload()


def test_an_adapters_layers_lie_where_the_models_do_and_are_counted_there(
    llama: Path, adapters: dict[str, MadeAdapter]
) -> None:
    shares = tuple(DeviceShare(device=f"sim:{n}", layers=1, working_bytes=1 << 30) for n in range(2))
    runner = load_runner(llama, device="auto", shares=shares)
    before = [share.weights_bytes for share in runner.shares]
    runner.adapters.attach(spec("all", adapters["all"]))
    runner.adapters.attach(spec("few", adapters["few"]))
    few_bytes = 8 * (64 + 128 + 64 + 256) * 4
    assert [share.weights_bytes - held for share, held in zip(runner.shares, before, strict=True)] == [
        49152 // 2,
        49152 // 2 + few_bytes,
    ]
    split = Driver(runner)
    runs = [split.add(prompt(1), adapter=name) for name in ("all", "", "few")]
    split.greedy(runs, STEPS)
    whole = load_runner(llama)
    whole.adapters.attach(spec("all", adapters["all"]))
    driver = Driver(whole)
    expected = driver.add(prompt(1), adapter="all")
    driver.greedy([expected], STEPS)
    assert runs[0].tokens == expected.tokens
    assert len({tuple(run.tokens) for run in runs}) == 3


def test_an_adapter_that_a_device_has_no_room_for_is_refused_with_its_name(
    llama: Path, tmp_path: Path, adapters: dict[str, MadeAdapter]
) -> None:
    runner = load_runner(llama, device="auto", shares=(DeviceShare(device="sim:0", weights_bytes=12 << 20),))
    large = make_adapter(tmp_path / "large", llama, rank=4096)
    before = runner.shares
    with pytest.raises(InsufficientMemory, match=r"the adapter large need 48 MiB on sim:0, which has \d+ MiB free"):
        runner.adapters.attach(spec("large", large))
    assert runner.shares == before


def test_what_is_loaded_says_that_requests_may_name_adapters(llama: Path) -> None:
    assert load_spec(TorchBackend(), ModelSpec(path=llama, name="tiny", kv_cache_tokens=256)).adapters_per_request
