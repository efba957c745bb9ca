"""From a plan to the library's loaded model, its cache and a generator over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from engine.backends.base import LoadedModel, LoadProgress
from engine.backends.exllama.adapters import load_adapter
from engine.backends.exllama.generators import GeneratorMaker
from engine.backends.exllama.holdings import Held, Holdings
from engine.backends.exllama.load_faults import LoadNumbers, explain_load
from engine.backends.exllama.memory import CudaGpus, Gpus
from engine.backends.exllama.parts import Library, LoadedParts
from engine.backends.exllama.plan import LoadPlan, ModelSource, plan_load
from engine.backends.exllama.progress import WeightsProgress
from engine.backends.exllama.quantised import refuse_malformed
from engine.backends.exllama.shares import device_shares
from engine.backends.exllama.sizes import PAGE_TOKENS, active_parameters, cache_pages, page_bytes_by_device, parameters
from engine.backends.exllama.split import whole
from engine.config import DeviceShare, ModelSpec

_GIB = 1 << 30


def load_parts(
    library: Library,
    spec: ModelSpec,
    *,
    max_prompts: int,
    report: Callable[[LoadProgress], None],
    cancelled: Callable[[], bool],
    gpus: Gpus | None = None,
) -> LoadedParts:
    """Load `spec`. Raises ModelLoadFailed or a child of it, InvalidRequest naming a setting that cannot be honoured;
    nothing is left allocated then."""
    gpus = gpus or CudaGpus()
    plan = plan_load(library, spec, max_prompts=max_prompts, gpus=gpus.count())
    loader = _Loader(plan, gpus, WeightsProgress(report, cancelled, plan.file_bytes))
    try:
        return loader.load()
    except Exception as error:
        failure = explain_load(error, loader.numbers)
    loader.holdings.free()  # only here: what was caught held on to tensors through its traceback
    raise failure


class _Loader:
    """One load: weights, adapter and caches into `holdings`, in the order that the split needs."""

    def __init__(self, plan: LoadPlan, gpus: Gpus, progress: WeightsProgress) -> None:
        self.holdings = Holdings(gpus)
        self._plan = plan
        self._gpus = gpus
        self._progress = progress
        self._free_bytes = {number: gpus.free_bytes(number) for number in plan.split.numbers}
        self._pages = 0

    @property
    def numbers(self) -> LoadNumbers:
        """What it needs and had, for messages."""
        plan = self._plan
        return LoadNumbers(
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
        models = self.holdings.models
        models += [Held(plan.library.model(source.config)) for source in plan.sources]
        for held, source in zip(models, plan.sources, strict=True):
            refuse_malformed(source.folder.path, held.model, self._progress.raise_if_cancelled)
        if plan.split.kind == "automatic":
            self._load_as_it_fits(models)
        else:
            self._load_weights_first(models)
        self._progress.cache(self.numbers.cache_bytes, done=True)
        return self._parts(tokenizer)

    # --- weights and caches -----------------------------------------------------------------------------------------

    def _load_as_it_fits(self, models: list[Held]) -> None:
        """Layer and cache by turns, the first GPU first; the draft model before the main one, which fills what is
        left. The library runs each layer on a whole chunk as it goes, so what was loaded also works."""
        plan = self._plan
        self._pages = self._estimated_pages()
        for held, source in reversed(list(zip(models, plan.sources, strict=True))):
            held.cache = self._new_cache(held.model, lazy=True)
            held.model.load_autosplit(
                held.cache,
                reserve_vram=list(plan.split.reserve_bytes),
                callback=self._progress.callback(held.model, source.folder.tensors),
            )
        self._apply_adapter(models[0].model)

    def _load_weights_first(self, models: list[Held]) -> None:
        """Weights, then caches of the size that is left on the GPUs, then one whole chunk through it all."""
        plan = self._plan
        (main, *drafts), (source, *draft_sources) = models, plan.sources
        if plan.split.kind == "tensor_parallel":
            self._pages = self._estimated_pages()
            self._load_split_layers(main.model, source)
        else:
            self._load_layers(main.model, source, plan.split.gigabytes or whole(0))
        self._apply_adapter(main.model)
        for held, draft in zip(drafts, draft_sources, strict=True):
            roomiest = max(plan.split.numbers, key=self._gpus.free_bytes)
            self._load_layers(held.model, draft, whole(roomiest))
        self._pages = self._pages or self._measured_pages(models)
        self._progress.cache(self.numbers.cache_bytes, done=False)
        for held in models:
            held.cache = self._new_cache(held.model, lazy=False)
        for held in models:
            _compute_chunk(held)

    def _load_layers(self, model: Any, source: ModelSource, gigabytes: tuple[float, ...]) -> None:
        model.load(list(gigabytes), callback=self._progress.callback(model, source.folder.tensors))

    def _load_split_layers(self, model: Any, source: ModelSource) -> None:
        """The library's own look at free memory fails where CUDA_VISIBLE_DEVICES holds names instead of numbers."""
        split = self._plan.split
        free = [(each - split.reserve_bytes[number]) / _GIB for number, each in self._free_bytes.items()]
        model.load_tp(
            list(split.gigabytes or free),
            callback=self._progress.callback(model, source.folder.tensors),
            expect_cache_tokens=self._pages * PAGE_TOKENS,
            expect_cache_base=self._plan.library.caches[self._plan.spec.cache_bits],
        )

    def _apply_adapter(self, model: Any) -> None:
        if self._plan.adapter is not None:
            self.holdings.adapters.append(load_adapter(self._plan.library.lora, model, self._plan.adapter))

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

    def _measured_pages(self, models: list[Held]) -> int:
        """After the weights are loaded: as much as the fullest GPU has room for."""
        plan, page_bytes = self._plan, Counter[int]()
        for held, source in zip(models, plan.sources, strict=True):
            page_bytes.update(page_bytes_by_device(source.cache, Counter(map(_number, held.model.cache_map.values()))))
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
        plan, models = self._plan, self.holdings.models
        config = plan.sources[0].config
        devices = [_devices(held.model) for held in models]
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
            tokenizer=tokenizer,
            info=info,
            pages=self._pages,
            draft_tokens=plan.draft_tokens,
            make_generator=GeneratorMaker(plan, tokenizer, self.holdings),
            free=self.holdings.free,
        )

    def _shares(self, models: list[Held], numbers: list[int]) -> tuple[DeviceShare, ...]:
        plan, main = self._plan, models[0].model
        layers, kv_bytes = Counter[int](), Counter[int]()
        for held, source in zip(models, plan.sources, strict=True):
            on = _layers_by_device(held.model, source.cache.layers)
            layers.update(on if held.model is main else {})
            if held.model.tp_context is None:
                kv_bytes.update(page_bytes_by_device(source.cache, on))
            else:
                kv_bytes.update(
                    dict.fromkeys(on, source.cache.page_bytes // len(on) + source.cache.unpacked_page_bytes)
                )
        taken = {number: self._free_bytes[number] - self._gpus.free_bytes(number) for number in numbers}
        held_bytes = {number: self._pages * each for number, each in kv_bytes.items()}
        return device_shares(taken, layers, held_bytes, plan.weights_bytes)


def _compute_chunk(held: Held) -> None:
    """The largest step there is, so that memory which runs out does so now. Its keys are overwritten later."""
    import torch

    tokens = torch.zeros((1, held.model.config.max_input_len), dtype=torch.long)
    held.model.forward(tokens, held.cache, preprocess_only=True)
    held.cache.current_seq_len = 0


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
