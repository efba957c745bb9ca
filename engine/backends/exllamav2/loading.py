"""From a plan to the library's loaded model, its cache and a generator over them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.backends.base import LoadedModel
from engine.backends.checkpoints.checkpoint import Checkpoint
from engine.backends.checkpoints.exl2 import PARTS as EXL2_PARTS
from engine.backends.checkpoints.exl2 import Exl2Linear
from engine.backends.checkpoints.gptq import PARTS as GPTQ_PARTS
from engine.backends.checkpoints.gptq import GptqLinear
from engine.backends.checkpoints.quantized_tensors import malformed_tensor
from engine.backends.common.exllama_memory import (
    PAGE_TOKENS,
    active_parameters,
    cache_pages,
    page_bytes_by_device,
    parameters,
    unpacking_warning,
)
from engine.backends.common.exllamav2_checkpoint import MIN_GROUP_ROWS
from engine.backends.common.quant_config import gptq_group_size
from engine.backends.exllama.generator_backend import LoadedParts
from engine.backends.exllama.load import (
    Gpus,
    LoadNumbers,
    ModelAndCache,
    WeightsProgress,
    device_shares,
    explain_load,
    open_all_files,
    whole,
)
from engine.backends.exllama.package import Report
from engine.backends.exllamav2.generator import GeneratorMaker, LoadAllocations
from engine.backends.exllamav2.library import PACKAGE, Library
from engine.backends.exllamav2.load_plan import LoadPlan, ModelSource, load_adapter, plan_load
from engine.config import DeviceShare, ModelSpec

# Tensors, looked at before the library has them: its native code goes by what stands in them and in the headers of
# their files, and writes where they say.

_logger = logging.getLogger(__name__)

_MARKS = ("q_weight", "qweight")
_ONLY_QUANTISED = {*EXL2_PARTS, *GPTQ_PARTS} - {"bias", *_MARKS}

ROW_MULTIPLE = 32
"""Rows that the library's kernels work on at once, whether they are there or not."""


def refuse_malformed(folder: Path, model: Any, raise_if_cancelled: Callable[[], None]) -> None:
    """Raise ModelLoadFailed for a damaged file of `folder`, or naming the first quantised tensor that does not fit the
    others of its layer, or the layer that `model`, which is not loaded yet, has in its place. Reads headers and the
    small tensors alone."""
    checkpoint = open_all_files(folder, getattr(model.config, "tensor_file_map", None))
    layers = {each.key: each for module in model.modules for each in (module, *module.submodules)}
    kinds = {key: kind for key, _, kind in (name.rpartition(".") for name in checkpoint) if kind in _MARKS}
    for name in checkpoint:
        key, _, kind = name.rpartition(".")
        if kind in _ONLY_QUANTISED and key not in kinds:
            raise malformed_tensor(key, kind, f"has no {' or '.join(_MARKS)} next to it")
    for key, kind in kinds.items():
        raise_if_cancelled()
        shape = (_check_exl2 if kind == "q_weight" else _check_gptq)(checkpoint, key)
        _refuse_misfit(key, kind, shape, layers.get(key))


def _check_exl2(checkpoint: Checkpoint, key: str) -> tuple[int, int]:
    """Rows and columns of the layer."""
    layer = Exl2Linear(key, **_read(checkpoint, key, EXL2_PARTS))
    for number, group in enumerate(layer.groups()):
        if group.rows % ROW_MULTIPLE:
            raise malformed_tensor(
                key, "q_groups", f"has {group.rows} rows in its group {number}; exllamav2 takes a multiple of 32"
            )
    return layer.in_features, layer.q_weight.shape[1]


def _check_gptq(checkpoint: Checkpoint, key: str) -> tuple[int, int]:
    layer = GptqLinear(key, **_read(checkpoint, key, GPTQ_PARTS), zero_offset=1)
    if layer.in_features % ROW_MULTIPLE:
        raise malformed_tensor(key, "qweight", f"has {layer.in_features} rows; exllamav2 takes a multiple of 32")
    groups = len(layer.scales)
    size = gptq_group_size(layer.in_features, groups)
    if size < MIN_GROUP_ROWS:
        raise malformed_tensor(
            key, "scales", f"has {groups} groups; exllamav2 takes {MIN_GROUP_ROWS} rows or more each"
        )
    rows = torch.bincount(layer.row_groups(), minlength=groups)
    if bool((rows[:-1] != size).any()):
        raise malformed_tensor(key, "g_idx", f"has groups of several sizes; exllamav2 takes {size} rows for each")
    return layer.in_features, layer.qweight.shape[1]


def _read(checkpoint: Checkpoint, key: str, parts: tuple[str, ...]) -> dict[str, Tensor]:
    """The layer's tensors. Of those whose values do not matter, not a byte is read. Raises ModelLoadFailed for one that
    is missing."""
    optional = ("bias", "g_idx")
    present = [part for part in parts if f"{key}.{part}" in checkpoint or part not in optional]
    return dict(zip(present, checkpoint.read(*(f"{key}.{part}" for part in present)), strict=True))


def _refuse_misfit(key: str, kind: str, shape: tuple[int, int], layer: Any) -> None:
    """Raise ModelLoadFailed where the library has a layer of another shape; it pads outputs, of which the tensors may
    know nothing."""
    if not hasattr(layer, "padding"):  # none, or no linear one
        return
    rows, columns = layer.in_features, layer.out_features
    if shape not in ((rows, columns), (rows, columns - layer.padding)):
        raise malformed_tensor(key, kind, f"is of {shape[0]} x {shape[1]}; config.json makes it {rows} x {columns}")


_GIB = 1 << 30


def load_parts(
    library: Library,
    spec: ModelSpec,
    *,
    max_prompts: int,
    report: Report,
    cancelled: Callable[[], bool],
    gpus: Gpus | None = None,
) -> LoadedParts:
    """Load `spec`. Raises ModelLoadFailed or a child of it, InvalidRequest naming a setting that cannot be honoured;
    nothing is left allocated then."""
    gpus = gpus or Gpus()
    plan = plan_load(library, spec, max_prompts=max_prompts, gpus=gpus.count())
    if plan.is_packed and (warning := unpacking_warning(max_prompts, parameters(plan.sources[0].folder.tensors))):
        _logger.warning("%s", warning)
    loader = _Loader(plan, gpus, WeightsProgress(report, cancelled, plan.file_bytes))
    try:
        return loader.load()
    except Exception as error:
        failure = explain_load(error, loader.numbers)
    loader.allocations.free()  # only here: the exception kept tensors alive through its traceback
    raise failure


class _Loader:
    """One load: weights, adapter and caches into `allocations`, in the order that the split needs."""

    def __init__(self, plan: LoadPlan, gpus: Gpus, progress: WeightsProgress) -> None:
        self.allocations = LoadAllocations(gpus)
        self._plan = plan
        self._gpus = gpus
        self._progress = progress
        self._free_bytes = {number: gpus.free_bytes(number) for number in plan.split.numbers}
        self._pages = 0

    @property
    def numbers(self) -> LoadNumbers:
        """Memory that it needs and had, for messages."""
        plan = self._plan
        return LoadNumbers(
            backend=PACKAGE.name,
            name=plan.spec.name,
            devices=plan.split.names,
            weights_bytes=plan.weights_bytes,
            cache_bytes=self._pages * plan.page_bytes,
            other_bytes=self._other_bytes,
            free_bytes=sum(self._free_bytes.values()),
            split=plan.split.kind == "given",
        )

    def load(self) -> LoadedParts:
        """Everything; raises what the library raises, or an error of ours."""
        plan = self._plan
        tokenizer = plan.library.tokenizer(plan.sources[0].config)
        models = self.allocations.models
        models += [ModelAndCache(plan.library.model(source.config)) for source in plan.sources]
        for part, source in zip(models, plan.sources, strict=True):
            refuse_malformed(source.folder.path, part.model, self._progress.raise_if_cancelled)
        if plan.split.kind == "automatic":
            self._load_as_it_fits(models)
        else:
            self._load_weights_first(models)
        self._progress.cache(self.numbers.cache_bytes, done=True)
        for source in plan.sources:
            plan.library.prepare(source.config, self._progress.kernels)
        if plan.spec.cache_bits != 16:
            for part, source in zip(models, plan.sources, strict=True):
                plan.library.read_packed(source.config, part.cache)
        return self._parts(tokenizer)

    # --- weights and caches -----------------------------------------------------------------------------------------

    def _load_as_it_fits(self, models: list[ModelAndCache]) -> None:
        """Layer and cache by turns, the first GPU first; the draft model before the main one, which fills what is
        left. The library runs each layer on a whole chunk as it goes, so what was loaded also works."""
        plan = self._plan
        self._pages = self._estimated_pages()
        for part, source in reversed(list(zip(models, plan.sources, strict=True))):
            part.cache = self._new_cache(part.model, lazy=True)
            part.model.load_autosplit(
                part.cache,
                reserve_vram=list(plan.split.reserve_bytes),
                callback=self._progress.callback(_keys(part.model), source.folder.tensors),
            )
        self._apply_adapter(models[0].model)

    def _load_weights_first(self, models: list[ModelAndCache]) -> None:
        """Weights, then caches of the size that is left on the GPUs, then one whole chunk through it all."""
        plan = self._plan
        (main, *drafts), (source, *draft_sources) = models, plan.sources
        if plan.split.kind == "tensor_parallel":
            self._pages = self._estimated_pages()
            self._load_split_layers(main.model, source)
        else:
            self._load_layers(main.model, source, plan.split.gigabytes or whole(0))
        self._apply_adapter(main.model)
        for part, draft in zip(drafts, draft_sources, strict=True):
            roomiest = max(plan.split.numbers, key=self._gpus.free_bytes)
            self._load_layers(part.model, draft, whole(roomiest))
        self._pages = self._pages or self._measured_pages(models)
        self._progress.cache(self.numbers.cache_bytes, done=False)
        for part in models:
            part.cache = self._new_cache(part.model, lazy=False)
        for part in models:
            _compute_chunk(part)

    def _load_layers(self, model: Any, source: ModelSource, gigabytes: tuple[float, ...]) -> None:
        model.load(list(gigabytes), callback=self._progress.callback(_keys(model), source.folder.tensors))

    def _load_split_layers(self, model: Any, source: ModelSource) -> None:
        """The library's own look at free memory fails where CUDA_VISIBLE_DEVICES holds names instead of numbers."""
        split = self._plan.split
        free = [(each - split.reserve_bytes[number]) / _GIB for number, each in self._free_bytes.items()]
        model.load_tp(
            list(split.gigabytes or free),
            callback=self._progress.callback(_keys(model), source.folder.tensors),
            expect_cache_tokens=self._pages * PAGE_TOKENS,
            expect_cache_base=self._plan.library.caches[self._plan.spec.cache_bits],
        )

    def _apply_adapter(self, model: Any) -> None:
        if self._plan.adapter is not None:
            self.allocations.adapters.append(load_adapter(self._plan.library.lora, model, self._plan.adapter))

    def _new_cache(self, model: Any, *, lazy: bool) -> Any:
        library, tokens = self._plan.library, self._pages * PAGE_TOKENS
        base = library.caches[self._plan.spec.cache_bits]
        if model.tp_context is not None:
            return library.cache_tp(model, base=base, batch_size=1, max_seq_len=tokens)
        return base(model, batch_size=1, max_seq_len=tokens, lazy=lazy)

    # --- sizes ------------------------------------------------------------------------------------------------------

    @property
    def _other_bytes(self) -> int:
        """Work buffers and reserves of all GPUs that may be used."""
        split = self._plan.split
        return sum(split.reserve_bytes[number] + self._plan.work_bytes for number in split.numbers)

    def _estimated_pages(self) -> int:
        """Before the weights are loaded: from what all GPUs have together, less all that goes there besides."""
        plan, everywhere = self._plan, self._plan.split.names
        page_bytes = plan.page_bytes + len(self._free_bytes) * plan.unpacked_page_bytes
        free_bytes = sum(self._free_bytes.values()) - self._other_bytes - plan.weights_bytes
        return self._sized({everywhere: page_bytes}, {everywhere: free_bytes})

    def _measured_pages(self, models: list[ModelAndCache]) -> int:
        """After the weights are loaded: as much as the fullest GPU has room for."""
        plan, page_bytes = self._plan, Counter[int]()
        for part, source in zip(models, plan.sources, strict=True):
            page_bytes.update(page_bytes_by_device(source.cache, Counter(map(_number, part.model.cache_map.values()))))
        free_bytes = {
            number: self._gpus.free_bytes(number) - plan.split.reserve_bytes[number] - plan.work_bytes
            for number in page_bytes
        }
        return self._sized(
            {f"cuda:{number}": each for number, each in page_bytes.items()},
            {f"cuda:{number}": each for number, each in free_bytes.items()},
        )

    def _sized(self, page_bytes: Mapping[str, int], free_bytes: Mapping[str, int]) -> int:
        return cache_pages(
            asked_tokens=self._plan.spec.kv_cache_tokens,
            max_prompts=self._plan.max_prompts,
            max_model_len=self._plan.max_model_len,
            page_bytes=page_bytes,
            free_bytes=free_bytes,
        )

    # --- the result -------------------------------------------------------------------------------------------------

    def _parts(self, tokenizer: Any) -> LoadedParts:
        plan, models = self._plan, self.allocations.models
        config = plan.sources[0].config
        devices = [_devices(part.model) for part in models]
        unpacked = sum(
            source.cache.unpacked_page_bytes * len(on) for source, on in zip(plan.sources, devices, strict=True)
        )
        info = LoadedModel(
            backend="exllamav2",
            architecture=config.architecture,
            dtype=plan.sources[0].folder.dtype,
            devices=tuple(f"cuda:{number}" for number in sorted(set().union(*devices))),
            vocab_size=config.vocab_size,
            max_model_len=plan.max_model_len,
            kv_tokens=self._pages * PAGE_TOKENS,
            page_tokens=PAGE_TOKENS,
            weights_bytes=plan.weights_bytes,
            kv_bytes=self._pages * (plan.page_bytes + unpacked),
            parameters=parameters(plan.sources[0].folder.tensors),
            active_parameters=active_parameters(
                plan.sources[0].folder.tensors,
                experts=config.num_experts or 0,
                per_token=config.num_experts_per_token or 0,
            ),
            attention=plan.library.attention,
            attention_reason=plan.library.attention_reason,
            shares=self._shares(models, sorted(set().union(*devices))),
        )
        return LoadedParts(
            library=plan.library,
            config=config,
            info=info,
            pages=self._pages,
            draft_tokens=plan.draft_tokens,
            make_generator=GeneratorMaker(plan, tokenizer, self.allocations),
            free=self.allocations.free,
        )

    def _shares(self, models: list[ModelAndCache], numbers: list[int]) -> tuple[DeviceShare, ...]:
        plan, main = self._plan, models[0].model
        layers, kv_bytes = Counter[int](), Counter[int]()
        for part, source in zip(models, plan.sources, strict=True):
            on = _layers_by_device(part.model, source.cache.layers)
            layers.update(on if part.model is main else {})
            if part.model.tp_context is None:
                kv_bytes.update(page_bytes_by_device(source.cache, on))
            else:
                kv_bytes.update(
                    dict.fromkeys(on, source.cache.page_bytes // len(on) + source.cache.unpacked_page_bytes)
                )
        used_bytes = {number: self._free_bytes[number] - self._gpus.free_bytes(number) for number in numbers}
        held_bytes = {number: self._pages * each for number, each in kv_bytes.items()}
        return device_shares(used_bytes, layers, held_bytes, plan.weights_bytes)


def _keys(model: Any) -> list[list[str]]:
    """For each of a model's modules, the keys of what it loads."""
    return [[*(each.key for each in module.submodules), module.key] for module in model.modules]


def _compute_chunk(part: ModelAndCache) -> None:
    """The largest step there is, so that memory which runs out does so now. Its keys are overwritten later."""
    tokens = torch.zeros((1, part.model.config.max_input_len), dtype=torch.long)
    part.model.forward(tokens, part.cache, preprocess_only=True)
    part.cache.current_seq_len = 0


def _devices(model: Any) -> set[int]:
    """The GPUs that a loaded model lies on."""
    if model.tp_context is not None:
        return set(model.tp_context.all_devices())
    return {_number(device) for device in model.cache_map.values()}


def _layers_by_device(model: Any, layers: int) -> Counter[int]:
    """How many of the layers each GPU holds, or has a part of."""
    if model.tp_context is not None:
        return Counter(dict.fromkeys(model.tp_context.all_devices(), layers))
    return Counter(map(_number, model.cache_map.values()))


def _number(device: str) -> int:
    return int(device.partition(":")[2])
