"""From folders and settings to the library's loaded model, its cache and generators over them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.backends.base import LoadedModel
from engine.backends.checkpoints.exl3 import PARTS, Exl3Linear
from engine.backends.checkpoints.quantized_tensors import malformed_tensor
from engine.backends.common.exllama_memory import (
    PAGE_TOKENS,
    active_parameters,
    cache_pages,
    loaded_bytes,
    parameters,
    stored_bytes,
    work_bytes,
)
from engine.backends.common.exllamav3_checkpoint import ModelFolder, read_folder
from engine.backends.common.model_config import context_length
from engine.backends.exllama.generator_backend import LoadedParts
from engine.backends.exllama.load import (
    Gpus,
    LoadNumbers,
    ModelAndCache,
    Split,
    WeightsProgress,
    device_shares,
    draft_tokens,
    explain_load,
    open_all_files,
    plan_split,
    refuse_drafts,
    refuse_other_vocabulary,
)
from engine.backends.exllama.package import Report
from engine.backends.exllamav3.library import PACKAGE, Library
from engine.config import DeviceShare, ModelSpec
from engine.errors import InvalidRequest

CHUNK_TOKENS = 2048
"""Most tokens of one sequence that are computed at once; a load makes room for as many."""

MAX_BATCH = 256
"""Sequences of one step; models with recurrent layers have a state for each of max_prompts instead."""

MAX_DRAFT_TOKENS = 8

PACKED_ROWS = 144
"""Max rows of a step that the library multiplies with weights as they are packed (AUTO_RECONSTRUCT_THRESHOLD). In one
of more it unpacks each matrix to 16 bits first. A sequence is a row, as is each draft token."""

NGRAM_TOKENS = 3
"""Tokens at the end of a text that must have come before in it, for those that followed them there to be a draft."""

HEAD_MULTIPLE = 32
"""Elements of a packed cache that share a scale."""

_GIB = 1 << 30
_EXCLUDED = -1.0
"""The library's word for a GPU that a load leaves alone."""

_logger = logging.getLogger(__name__)


def refuse_settings(spec: ModelSpec) -> None:
    """Raise InvalidRequest for the first setting that this backend does not honour."""
    refused: tuple[tuple[str, bool, str], ...] = (
        ("dtype", spec.dtype not in ("auto", "float16"), "exllamav3 computes in float16 only"),
        ("weights", spec.weights != "auto", "exllamav3 computes from the weights as they are packed"),
        ("attention", spec.attention != "auto", "exllamav3 has an attention of its own"),
        ("deterministic", spec.deterministic, "exllamav3 does not promise it"),
        ("tensor_parallel", spec.tensor_parallel, "this backend splits models by layers only"),
        ("tensor_parallel_size", spec.tensor_parallel_size > 1, "this backend splits models by layers only"),
        ("alpha_value", spec.alpha_value is not None, "exllamav3 takes the RoPE of config.json"),
        ("compress_pos_emb", spec.compress_pos_emb is not None, "exllamav3 takes the RoPE of config.json"),
        ("num_experts", spec.num_experts is not None, "exllamav3 takes the number of config.json"),
        ("lora", spec.lora is not None, "this backend applies no adapters"),
    )
    refuse_drafts(spec, MAX_DRAFT_TOKENS)
    for param, is_refused, reason in refused:
        if is_refused:
            raise InvalidRequest(f"{param} is not supported: {reason}", param=param)


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
    refuse_settings(spec)
    split = plan_split(spec, gpus.count(), PACKAGE.name)
    folder = read_folder(spec.path)
    folders = [folder] if spec.draft_model is None else [folder, read_folder(spec.draft_model)]
    progress = WeightsProgress(report, cancelled, sum(stored_bytes(each.tensors) for each in folders))
    loader = _Loader(library, spec, folders, split, gpus, progress, max_prompts)
    try:
        return loader.load()
    except Exception as error:
        failure = explain_load(error, loader.numbers)
    gpus.lift_limits()
    loader.allocations.free()  # only here: the exception kept tensors alive through its traceback
    raise failure


# What a load allocates, in one place, so that it can be given back whole, and generators over it.


class NoText:
    """In the place of the library's tokenizer: texts are not its to make, so that every token's is empty, and none of
    them is held back."""

    def __init__(self, ids: int) -> None:
        self._pieces = [""] * ids

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """The text of each id."""
        return self._pieces


@dataclass(slots=True)
class LoadAllocations:
    """The library's objects that own memory. Other references to them (jobs, results) go before `free`.

    models: the main one first.
    """

    gpus: Gpus
    models: list[ModelAndCache] = field(default_factory=list)
    generator: Any = None

    def close_generator(self) -> None:
        """Drop the generator, its threads, and the states that it keeps in RAM."""
        generator, self.generator = self.generator, None
        if generator is not None:
            _try(generator.close)

    def free(self) -> None:
        """Give everything back; idempotent. What fails to unload is logged, and the rest goes all the same."""
        had_any = bool(self.models)
        self.close_generator()
        for part in self.models:
            part.cache = None
            _try(part.model.unload)
        self.models.clear()
        if had_any:
            self.gpus.give_back()


def _try(unload: Callable[[], None]) -> None:
    try:
        unload()
    except Exception:
        _logger.exception("part of the model could not be unloaded")


@dataclass(frozen=True, slots=True)
class GeneratorMaker:
    """Makes generators over what `allocations` holds, one at a time. Raises RuntimeError once that was given back."""

    library: Library
    allocations: LoadAllocations
    vocab_size: int
    chunk_tokens: int
    draft_tokens: int = 0

    def __call__(self) -> Any:
        allocations = self.allocations
        if not allocations.models:
            raise RuntimeError("the model has been unloaded")
        allocations.close_generator()
        main, *drafts = allocations.models
        draft = drafts[0] if drafts else ModelAndCache(None)
        generator = self.library.generator(
            model=main.model,
            cache=main.cache,
            tokenizer=NoText(self.vocab_size),
            max_batch_size=MAX_BATCH,
            max_chunk_size=self.chunk_tokens,
            draft_model=draft.model,
            draft_cache=draft.cache,
            num_draft_tokens=self.draft_tokens,
            ngram_match_min=NGRAM_TOKENS if self.draft_tokens and not drafts else 0,
            draft_max_rows=PACKED_ROWS,
        )
        generator.iterate_ngram_gen = _limited(generator, generator.iterate_ngram_gen)
        if drafts:
            generator.draft_model = UnpaddedLogits(draft.model)
            generator.iterate_gen = _without_gaps(generator, generator.iterate_gen)
        allocations.generator = generator
        return generator


class UnpaddedLogits:
    """A draft model whose logits are those of its vocabulary. The library pads them with zeros, drafts the id of the
    largest, and looks it up."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """Logits [sequences, tokens, vocab]."""
        logits: Tensor = self._model.forward(*args, **options)
        return logits[..., : self._model.config.vocab_size]


def _limited(generator: Any, draft: Callable[[list[Any]], Tensor | None]) -> Callable[[list[Any]], Tensor | None]:
    """The library's method to draft by n-grams, cut to the rows to which it cuts the drafts of models alone."""

    def drafts(results: list[Any]) -> Tensor | None:
        drafted, number = draft(results), generator.row_limited(generator.num_draft_tokens)
        return drafted[:, :number] if drafted is not None and number else None

    return drafts


def _without_gaps(
    generator: Any, step: Callable[[list[Any], Tensor | None], None]
) -> Callable[[list[Any], Tensor | None], None]:
    """The library's step, before which the draft model computes the last token of each sequence where it has drafted
    nothing; its cache would lack the keys of that token, and its later drafts be worse."""

    def computed(results: list[Any], drafted: Tensor | None = None) -> None:
        if drafted is None:
            generator.iterate_draftmodel_gen(results, 0)
        step(results, drafted)

    return computed


class _Loader:
    """One load: weights and cache into `allocations`, layer by layer, the first GPU first."""

    def __init__(
        self,
        library: Library,
        spec: ModelSpec,
        folders: list[ModelFolder],
        split: Split,
        gpus: Gpus,
        progress: WeightsProgress,
        max_prompts: int,
    ) -> None:
        self.allocations = LoadAllocations(gpus)
        self._library = library
        self._spec = spec
        self._folder = folders[0]
        self._folders = folders
        self._split = split
        self._gpus = gpus
        self._progress = progress
        self._max_prompts = max_prompts
        self._free_bytes = {number: gpus.free_bytes(number) for number in split.numbers}
        self._weights_bytes = sum(loaded_bytes(folder.tensors) for folder in folders)
        self._work_bytes = self._page_bytes = self._pages = 0

    @property
    def numbers(self) -> LoadNumbers:
        """Memory that it needs and had, for messages."""
        return LoadNumbers(
            backend=PACKAGE.name,
            name=self._spec.name,
            devices=self._split.names,
            weights_bytes=self._weights_bytes,
            cache_bytes=self._pages * self._page_bytes,
            other_bytes=self._other_bytes,
            free_bytes=sum(self._free_bytes.values()),
            split=self._split.kind == "given",
        )

    def load(self) -> LoadedParts:
        """Everything; raises what the library raises, or an error of ours."""
        library, spec = self._library, self._spec
        config, *drafting = [library.config.from_directory(str(folder.path)) for folder in self._folders]
        longest = int(config.max_position_embeddings)
        max_model_len = context_length(spec.max_model_len, longest, longest)
        chunk = min(max_model_len, spec.kv_cache_tokens or CHUNK_TOKENS, CHUNK_TOKENS)
        chunk = -(-chunk // PAGE_TOKENS) * PAGE_TOKENS
        for draft in drafting:
            refuse_other_vocabulary(self._folder.path, self._folders[1].path, config.vocab_size, draft.vocab_size)
        models = self.allocations.models
        for each, folder in zip((config, *drafting), self._folders, strict=True):
            self._refuse_heads(each)
            part = ModelAndCache(library.model.from_config(each))
            models.append(part)
            self._refuse_states(part.model)
            refuse_malformed(folder, part.model, self._progress.raise_if_cancelled)
            self._work_bytes += work_bytes(
                hidden_size=each.hidden_size,
                intermediate_size=_inner_size(each),
                vocab_size=each.vocab_size,
                chunk_tokens=chunk,
            )
            self._page_bytes += self._measured_page_bytes(part.model)
        self._pages = self._sized_pages(max_model_len)
        for part, folder in reversed(list(zip(models, self._folders, strict=True))):  # the main one fills what is left
            part.cache = self._new_cache(part.model, self._pages)
            keys = [[each.key for each in module] for module in part.model.modules]
            part.model.load(
                **self._division(), max_chunk_size=chunk, callback=self._progress.callback(keys, folder.tensors)
            )
        self._progress.cache(self._pages * self._page_bytes, done=True)
        return LoadedParts(
            library=library,
            config=config,
            info=self._info(config, max_model_len),
            pages=self._pages,
            draft_tokens=draft_tokens(spec),
            make_generator=GeneratorMaker(
                library, self.allocations, config.vocab_size, chunk, draft_tokens=draft_tokens(spec)
            ),
            free=self.allocations.free,
        )

    def _division(self) -> dict[str, list[float]]:
        """How the library is to spread the model, in units of 1024**3 bytes by GPU."""
        split = self._split
        if split.kind == "given":
            return {"use_per_device": list(split.gigabytes or ())}
        reserve = enumerate(split.reserve_bytes)
        return {
            "reserve_per_device": [size / _GIB if number in self._free_bytes else _EXCLUDED for number, size in reserve]
        }

    def _refuse_heads(self, config: Any) -> None:
        bits, head_dim = self._spec.cache_bits, config.head_dim
        if bits != 16 and head_dim and head_dim % HEAD_MULTIPLE:
            raise InvalidRequest(
                f"cache_bits is {bits}; heads of {head_dim} elements need 16 bits", param="cache_bits", value=bits
            )

    def _refuse_states(self, model: Any) -> None:
        """Drafts that turn out wrong would have to be taken out of the states of recurrent layers too."""
        if draft_tokens(self._spec) and model.caps.get("recurrent_states"):
            param = "ngram_draft" if self._spec.ngram_draft else "draft_model"
            raise InvalidRequest(
                f"{param} is not supported: this backend does not draft for or by models with recurrent layers or "
                "caches of a window",
                param=param,
            )

    # --- sizes ------------------------------------------------------------------------------------------------------

    def _new_cache(self, model: Any, pages: int) -> Any:
        library, bits = self._library, self._spec.cache_bits
        options = {} if bits == 16 else {"k_bits": bits, "v_bits": bits}
        return library.cache(
            model,
            max_num_tokens=pages * PAGE_TOKENS,
            layer_type=library.packed_layer if options else library.float_layer,
            max_batch_size=self._max_prompts,
            **options,
        )

    def _measured_page_bytes(self, model: Any) -> int:
        """Bytes of a page in all layers: the library has layers of several kinds, each of which knows its size."""
        cache = self._new_cache(model, 1)
        try:
            return sum(int(layer.storage_size()) for layer in cache.layers.values())
        finally:
            cache.detach_from_model()

    @property
    def _other_bytes(self) -> int:
        """Work buffers and reserves of all GPUs that may be used."""
        reserve = self._split.reserve_bytes
        return sum(reserve[number] + self._work_bytes for number in self._split.numbers)

    def _sized_pages(self, max_model_len: int) -> int:
        """Before the weights are loaded: from what all GPUs have together, less all that goes there besides."""
        given = self._split.gigabytes if self._split.kind == "given" else None
        usable = (
            free if given is None else min(free, int(given[number] * _GIB)) for number, free in self._free_bytes.items()
        )
        everywhere = self._split.names
        return cache_pages(
            asked_tokens=self._spec.kv_cache_tokens,
            max_prompts=self._max_prompts,
            max_model_len=max_model_len,
            page_bytes={everywhere: max(1, self._page_bytes)},
            free_bytes={everywhere: sum(usable) - self._other_bytes - self._weights_bytes},
        )

    # --- the result -------------------------------------------------------------------------------------------------

    def _info(self, config: Any, max_model_len: int) -> LoadedModel:
        tensors = self._folder.tensors
        shares = self._shares()
        return LoadedModel(
            backend=PACKAGE.name,
            architecture=self._folder.architecture,
            dtype=self._folder.dtype,
            devices=tuple(share.device for share in shares),
            vocab_size=config.vocab_size,
            max_model_len=max_model_len,
            kv_tokens=self._pages * PAGE_TOKENS,
            page_tokens=PAGE_TOKENS,
            weights_bytes=self._weights_bytes,
            kv_bytes=self._pages * self._page_bytes,
            parameters=parameters(tensors),
            active_parameters=active_parameters(
                tensors,
                experts=getattr(config, "num_experts", None) or 0,
                per_token=getattr(config, "num_experts_per_tok", None) or 0,
            ),
            attention="exllamav3",
            attention_reason="the library's own, its only one",
            shares=shares,
        )

    def _shares(self) -> tuple[DeviceShare, ...]:
        layers, kv_bytes = Counter[int](), Counter[int]()
        for module in self.allocations.models[0].model.modules:
            if module.layer_idx is not None:
                layers[_number(module.device)] += 1
        for part in self.allocations.models:
            for layer in part.cache.layers.values():
                kv_bytes[_number(layer.device)] += int(layer.storage_size())
        numbers = sorted({*layers, *kv_bytes})
        used_bytes = {number: self._free_bytes[number] - self._gpus.free_bytes(number) for number in numbers}
        return device_shares(used_bytes, layers, kv_bytes, self._weights_bytes)


def _inner_size(config: Any) -> int:
    """Width of the inner layer of a block; of an expert where there is no other."""
    return int(getattr(config, "intermediate_size", None) or getattr(config, "moe_intermediate_size", None) or 0)


def _number(device: Any) -> int:
    """The GPU that a torch.device names."""
    return int(device.index or 0)


# Tensors, looked at before the library has them: its native code goes by what their headers say.


def refuse_malformed(folder: ModelFolder, model: Any, raise_if_cancelled: Callable[[], None]) -> None:
    """Raise ModelLoadFailed naming the first packed tensor that does not fit the others of its layer, or the layer that
    `model`, which is not loaded yet, has in its place. Reads headers and the codebooks' markers alone."""
    checkpoint = open_all_files(folder.path)
    layers = {part.key: part for module in model.modules for part in module}
    for name in checkpoint:
        key, _, kind = name.rpartition(".")
        if kind != "trellis":
            continue
        raise_if_cancelled()
        present = [part for part in PARTS if f"{key}.{part}" in checkpoint]
        stored = checkpoint.read(*(f"{key}.{part}" for part in present))
        trellis = Exl3Linear(key, **dict(zip(present, stored, strict=True))).trellis
        shape = trellis.shape[0] * 16, trellis.shape[1] * 16
        layer = layers.get(key)
        wanted = getattr(layer, "in_features", shape[0]), getattr(layer, "out_features", shape[1])
        if shape != wanted:
            raise malformed_tensor(
                key, "trellis", f"is of {shape[0]} x {shape[1]}; config.json makes it {wanted[0]} x {wanted[1]}"
            )
