"""A load by the exllamav3 backend with the package's own Config, Model and Cache; what its load would do on GPUs is
accounted for by fake ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.backends.common.exllama_memory import CacheShape
from engine.backends.exllama.generator_backend import LoadedParts
from engine.backends.exllamav3.library import Library
from engine.backends.exllamav3.loading import NGRAM_TOKENS, PACKED_ROWS, load_parts
from engine.config import CacheBits, ModelSpec
from engine.errors import (
    InsufficientMemory,
    InvalidRequest,
    LoadCancelled,
    ModelLoadFailed,
    UnsupportedModel,
)
from tests.fakes.exllama3 import importable, real_library
from tests.fakes.exllama_model import GIB, FakeGpus
from tests.fakes.quantised_folders import edit_config, edit_weights, make_twins

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 64


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_size": 256}
    folder = make_twins(tmp_path_factory.mktemp("exl3"), "exl3", num_hidden_layers=LAYERS, **sizes).quantised
    edit_config(folder, max_position_embeddings=4096)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


class Limited(FakeGpus):
    """Notes whether limits of a load were lifted."""

    lifted = 0

    def lift_limits(self) -> None:
        self.lifted += 1


class SimulatedLoad:
    """In the place of `Model.load`: each module in turn on a GPU, and the cache's layers with theirs. asked: by what
    arguments.  loaded: the models, in order.  failure: raised before that module."""

    def __init__(self, gpus: FakeGpus, failure: tuple[int, Exception] | None = None) -> None:
        self.asked: dict[str, Any] = {}
        self.loaded: list[Any] = []
        self._gpus = gpus
        self._failure = failure

    def __call__(self, model: Any, *, callback: Callable[[int, int], None], **asked: Any) -> None:
        self.asked = asked
        [cache] = [each() for each in model.cache_weakrefs.values()]
        self.loaded.append(model)
        for index, module in enumerate(model.modules):
            callback(index, len(model.modules))
            if self._failure is not None and self._failure[0] == index:
                raise self._failure[1]
            module.device = torch.device("cuda", 0)
            self._gpus.take(0, sum(self._size(model, part) for part in module))
        for layer in cache.layers.values():
            layer.device = torch.device("cuda", 0)
            self._gpus.take(0, int(layer.storage_size()))
        callback(len(model.modules), len(model.modules))
        cache.initialized = True

    def _size(self, model: Any, part: Any) -> int:
        return sum(model.config.stc.get_tensor_sizes(part.key)) if not part.modules else 0


def load(
    folder: Path,
    gpus: Limited,
    *,
    simulated: SimulatedLoad | None = None,
    report: Callable[[LoadProgress], None] = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
    **spec: Any,
) -> LoadedParts:
    """Load the folder with the real library but for the load."""
    library: Library = real_library().library
    simulated = simulated or SimulatedLoad(gpus)

    class Loads:
        """The real models, which load as simulated."""

        @staticmethod
        def from_config(config: Any) -> Any:
            model = library.model.from_config(config)
            model.load = lambda **asked: simulated(model, **asked)
            return model

    with importable():
        return load_parts(
            replace(library, model=Loads),
            ModelSpec(path=folder, name="tiny", backend="exllamav3", **spec),
            max_prompts=4,
            report=report,
            cancelled=cancelled,
            gpus=gpus,
        )


def test_a_load_says_what_it_ended_with(folder: Path) -> None:
    gpus = Limited(8 * GIB)
    seen: list[LoadProgress] = []
    parts = load(folder, gpus, kv_cache_tokens=1000, report=seen.append)
    info = parts.info
    assert (info.backend, info.architecture, info.dtype) == ("exllamav3", "LlamaForCausalLM", "exl3 4.0 bpw")
    assert (info.devices, info.max_model_len, info.kv_tokens, info.page_tokens) == (("cuda:0",), 4096, 1024, 256)
    assert info.kv_bytes == 1024 * LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
    [share] = info.shares
    assert (share.layers, share.kv_bytes, share.weights_bytes) == (LAYERS, info.kv_bytes, info.weights_bytes)
    weights = [each for each in seen if each.phase == "weights"]
    assert weights[-1].done == weights[-1].total > info.weights_bytes // 2
    assert [each.done for each in weights] == sorted(each.done for each in weights)
    assert (seen[-1].phase, seen[-1].done) == ("kv_cache", info.kv_bytes)


def test_parameters_are_those_that_the_packed_weights_stand_for(folder: Path) -> None:
    with importable():
        config = real_library().library.config.from_directory(str(folder))
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    attention = hidden * HEAD_DIM * (4 + 4 + 2 * KV_HEADS)
    padded = 128 * -(-vocab // 128)
    parameters = load(folder, Limited(8 * GIB), kv_cache_tokens=256).info.parameters
    expected = LAYERS * (attention + 3 * hidden * inner + 2 * hidden) + hidden * (vocab + padded + 1)
    assert expected <= parameters <= expected * 1.6  # layers are padded to multiples of 128


@pytest.mark.parametrize("bits", [16, 8, 6, 4])
def test_a_page_takes_as_much_as_the_estimate_has_it(folder: Path, bits: CacheBits) -> None:
    parts = load(folder, Limited(8 * GIB), kv_cache_tokens=256, cache_bits=bits)
    assert parts.info.kv_bytes == CacheShape(LAYERS, KV_HEADS, HEAD_DIM, bits).page_bytes


def test_pages_are_sized_by_what_the_gpus_have_left(folder: Path) -> None:
    assert load(folder, Limited(8 * GIB)).pages == 4 * 8  # four requests of 2,048 tokens
    with pytest.raises(InsufficientMemory, match="KV pages of one request") as refused:
        load(folder, Limited(600 << 20))
    free = refused.value.details["free_bytes"]
    assert isinstance(free, int)
    besides = (600 << 20) - free
    assert load(folder, Limited(besides + (4 << 20))).pages == int(0.9 * (4 << 20)) // (256 << 10)


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        ({}, {"reserve_per_device": [192 / 1024, 64 / 1024]}),
        ({"gpu_reserve_mib": (512, 256)}, {"reserve_per_device": [0.5, 0.25]}),
        ({"device": "cuda:0"}, {"reserve_per_device": [192 / 1024, -1.0]}),
        ({"gpu_split_gb": (4.0, 2.0)}, {"use_per_device": [4.0, 2.0]}),
    ],
)
def test_gpus_are_used_as_asked(folder: Path, spec: dict[str, Any], asked: dict[str, Any]) -> None:
    gpus = Limited(8 * GIB, 8 * GIB)
    simulated = SimulatedLoad(gpus)
    load(folder, gpus, simulated=simulated, **spec)
    assert simulated.asked == {"max_chunk_size": 2048, **asked}


def test_a_draft_model_is_loaded_before_the_one_that_fills_the_rest_and_has_a_cache_of_its_own(
    folder: Path, tmp_path: Path
) -> None:
    gpus = Limited(8 * GIB)
    simulated = SimulatedLoad(gpus)
    draft = shutil.copytree(folder, tmp_path / "draft")
    seen: list[LoadProgress] = []
    parts = load(
        folder, gpus, simulated=simulated, report=seen.append, kv_cache_tokens=1000, draft_model=draft, draft_tokens=3
    )
    alone = load(folder, Limited(8 * GIB), kv_cache_tokens=1000)
    with importable():
        generator = parts.make_generator()
    main, cache = generator.model, generator.cache
    assert [model.config.directory for model in simulated.loaded] == [str(draft), str(folder)]
    assert simulated.loaded[1] is main
    assert generator.draft_cache is not cache
    assert (generator.draft_cache.max_num_tokens, cache.max_num_tokens) == (1024, 1024)
    assert (generator.num_draft_tokens, generator.ngram_match_min, parts.draft_tokens) == (3, 0, 3)
    assert generator.draft_max_rows == PACKED_ROWS
    assert parts.info.kv_bytes == 2 * alone.info.kv_bytes
    assert parts.info.weights_bytes == 2 * alone.info.weights_bytes
    [share] = parts.info.shares
    assert (share.layers, share.kv_bytes) == (LAYERS, parts.info.kv_bytes)
    weights = [each for each in seen if each.phase == "weights"]
    assert [each.done for each in weights] == sorted(each.done for each in weights)
    assert weights[-1].done == weights[-1].total
    parts.free()
    assert gpus.collected == 1


def test_ngram_drafts_need_no_second_model(folder: Path) -> None:
    with importable():
        generator = load(folder, Limited(8 * GIB), kv_cache_tokens=1000, ngram_draft=True).make_generator()
    assert (generator.draft_model, generator.num_draft_tokens, generator.ngram_match_min) == (None, 4, NGRAM_TOKENS)


def test_a_draft_model_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(folder, tmp_path / "draft")
    edit_config(draft, vocab_size=4096)
    with pytest.raises(UnsupportedModel, match="the draft model draft and model have different vocabularies"):
        load(folder, Limited(8 * GIB), draft_model=draft)


@pytest.mark.parametrize("param", ["ngram_draft", "draft_model"])
def test_models_with_states_are_not_drafted_for(folder: Path, monkeypatch: pytest.MonkeyPatch, param: str) -> None:
    from_config = real_library().library.model.from_config

    def recurrent(config: Any) -> Any:
        model = from_config(config)
        model.caps["recurrent_states"] = True
        return model

    monkeypatch.setattr(real_library().library.model, "from_config", recurrent)
    with pytest.raises(InvalidRequest, match=f"^{param} is not supported: .* recurrent layers"):
        load(folder, Limited(8 * GIB), **{param: True if param == "ngram_draft" else folder})


def test_free_gives_the_model_and_its_generator_back(folder: Path) -> None:
    gpus = Limited(8 * GIB)
    parts = load(folder, gpus, kv_cache_tokens=1000)
    parts.free()
    parts.free()
    assert gpus.collected == 1
    with pytest.raises(RuntimeError, match="has been unloaded"):
        parts.make_generator()


def test_a_cancelled_load_stops_between_two_modules_and_lifts_the_limits(folder: Path) -> None:
    gpus = Limited(8 * GIB)
    seen: list[LoadProgress] = []
    with pytest.raises(LoadCancelled):
        load(folder, gpus, report=seen.append, cancelled=lambda: len(seen) >= 3)
    assert (len(seen), gpus.lifted, gpus.collected) == (3, 1, 1)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (RuntimeError("Insufficient VRAM in split for model and cache"), InsufficientMemory, "tiny does not fit on"),
        (ValueError("a tensor is odd"), ModelLoadFailed, "exllamav3 could not load tiny: ValueError: a tensor is odd"),
    ],
)
def test_a_failed_load_is_one_sentence(folder: Path, error: Exception, kind: type[Exception], said: str) -> None:
    gpus = Limited(8 * GIB)
    with pytest.raises(kind, match=said):
        load(folder, gpus, simulated=SimulatedLoad(gpus, (2, error)))
    assert gpus.collected == 1


@pytest.mark.parametrize(
    ("spec", "param"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"weights": "int8"}, "weights"),
        ({"attention": "triton"}, "attention"),
        ({"deterministic": True}, "deterministic"),
        ({"tensor_parallel": True}, "tensor_parallel"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"alpha_value": 2.0}, "alpha_value"),
        ({"compress_pos_emb": 2.0}, "compress_pos_emb"),
        ({"num_experts": 2}, "num_experts"),
        ({"lora": Path("lora")}, "lora"),
        ({"ngram_draft": True, "draft_model": Path("draft")}, "ngram_draft"),
        ({"draft_tokens": 3}, "draft_tokens"),
        ({"ngram_draft": True, "draft_tokens": 9}, "draft_tokens"),
    ],
)
def test_settings_that_it_does_not_honour_are_refused_by_name(folder: Path, spec: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{param} is not supported: ") as refused:
        load(folder, Limited(8 * GIB), **spec)
    assert refused.value.details["param"] == param


def test_a_context_beyond_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="max_model_len is 5000; this model takes from 1 to 4096"):
        load(folder, Limited(8 * GIB), max_model_len=5000)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "names 2 architectures"),
        ({"architectures": ["NewForCausalLM"]}, "unsupported architecture: NewForCausalLM"),
        ({"quantization_config": {"quant_method": "exl2", "bits": 4.0}}, "the weights are exl2; exllamav3 reads EXL3"),
    ],
)
def test_a_folder_that_is_not_for_it_is_refused(folder: Path, changes: dict[str, Any], reason: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        load(folder, Limited(8 * GIB))


QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensor", "value", "reason"),
    [
        ("svh", torch.ones(64, dtype=torch.float16), "svh"),
        ("mcg", torch.tensor(7, dtype=torch.int32), "mcg"),
        ("trellis", torch.zeros(16, 8, 64, dtype=torch.int16), ""),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_the_library_has_them(
    folder: Path, tensor: str, value: Tensor, reason: str
) -> None:
    edit_weights(folder, **{f"{QUERY}.{tensor}": value})
    gpus = Limited(8 * GIB)
    simulated = SimulatedLoad(gpus)
    with pytest.raises(ModelLoadFailed, match=f"{QUERY}.{reason}"):
        load(folder, gpus, simulated=simulated)
    assert simulated.asked == {}


def test_a_layer_of_another_size_than_config_json_has_is_refused(folder: Path) -> None:
    edit_config(folder, hidden_size=512)
    with pytest.raises(ModelLoadFailed, match=r"config\.json makes it"):
        load(folder, Limited(8 * GIB))
