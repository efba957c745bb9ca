"""From a model folder and the settings of a load to a decoder on its devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.backends.base import LoadProgress
from engine.backends.common.families import architectures
from engine.backends.common.families.experts import ExpertNames, idle_elements
from engine.backends.common.model_config import CheckpointDtype, ModelConfig, read_model_config
from engine.backends.common.packed_weights import keeps_float16
from engine.backends.common.torch_load_settings import apply_settings, refuse_settings
from engine.backends.torch.device_memory import DeviceMemory, open_devices
from engine.backends.torch.layout import Layout, lay_out
from engine.backends.torch.model.decoder import Decoder
from engine.backends.torch.model.linear import dtype_name, native_bfloat16
from engine.backends.torch.native.library import Kernels, find_kernels
from engine.backends.torch.weights.adapters import locate_factors, merged
from engine.backends.torch.weights.decoder_loader import DecoderLoader, as_stored, tensor_shapes
from engine.backends.torch.weights.reader import WeightReader, locate
from engine.backends.torch.weights.shared import weight_store
from engine.backends.torch.weights.store import OwnWeights
from engine.backends.torch_common.checkpoint import Checkpoint, TensorInfo
from engine.backends.torch_common.quantized_tensors import by
from engine.config import DtypeName, ModelSpec
from engine.errors import InvalidRequest, ModelLoadFailed
from engine.models.adapters import CONFIG, WEIGHTS

# Checkpoints of multimodal models, seen as if they were those of their model of text.

_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
"""What stands before the names of the text's tensors, as transformers writes them now and as it did, and what a model
of text alone has in its place."""


def language_model_only(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint`, its model of text under the names that such a model has by itself."""
    found: dict[str, TensorInfo] = {}
    for name in checkpoint:
        for prefix, plain in _PREFIXES:
            if name.startswith(prefix):
                found[plain + name.removeprefix(prefix)] = replace(checkpoint.info(name), stored_as=name)
                break
    return checkpoint.with_pieces(found) if found else checkpoint


# Checkpoints that keep all experts of a layer in one tensor, as transformers computes with them, seen as if each
# expert had tensors of its own.

_ROUTER = "mlp.gate.weight"
_GATE_UP = "mlp.experts.gate_up_proj"
"""[experts, 2 * inner, hidden], each expert's gate first."""

_DOWN = "mlp.experts.down_proj"
"""[experts, hidden, inner]."""


def by_expert(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """`checkpoint`, its fused experts under the names that they have one by one. Raises ModelLoadFailed, naming a
    tensor that is none of several experts."""
    if config.traits.experts is None:
        return checkpoint
    names = architectures()[config.architecture].names
    found: dict[str, TensorInfo] = {}
    for layer in map(names.layer.format, range(config.layers)):
        if f"{layer}.{_GATE_UP}" in checkpoint:
            found |= {f"{layer}.{name}.weight": info for name, info in _pieces(checkpoint, layer, names.experts)}
    return checkpoint.with_pieces(found)


def _pieces(checkpoint: Checkpoint, layer: str, names: ExpertNames) -> Iterator[tuple[str, TensorInfo]]:
    if f"{layer}.{_ROUTER}" in checkpoint:
        yield names.router, replace(checkpoint.info(f"{layer}.{_ROUTER}"), stored_as=f"{layer}.{_ROUTER}")
    for fused, parts in ((_GATE_UP, (names.gate, names.up)), (_DOWN, (names.down,))):
        info = replace(checkpoint.info(f"{layer}.{fused}"), stored_as=f"{layer}.{fused}")
        if len(info.shape) != 3 or info.shape[1] % len(parts):
            raise ModelLoadFailed(
                f"the tensor {layer}.{fused} in {info.file.name} is {by(info.shape)}, which is not several experts",
                tensor=f"{layer}.{fused}",
            )
        rows = info.shape[1] // len(parts)
        for number in range(info.shape[0]):
            for place, part in enumerate(parts):
                yield f"{names.expert.format(number)}.{part}", info.matrix(number, place * rows, rows)


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """A decoder whose weights, of `dtype`, lie where `layout` says and are entered there.

    kernels: what computes its linear layers, and may compute its attention.
    parameters: how many it has; active_parameters: those that a token is computed with.
    shared_bytes: how much of the weights all workers of this machine have once.
    enlarge_pages: backs the weights with large pages, in the background; for when the load is over.
    """

    decoder: Decoder
    dtype: torch.dtype
    kernels: Kernels
    layout: Layout
    parameters: int
    active_parameters: int
    shared_bytes: int
    enlarge_pages: Callable[[], None]


def load_decoder(
    path: Path,
    spec: ModelSpec,
    *,
    report: Callable[[LoadProgress], None],
    cancelled: Callable[[], bool],
    devices: tuple[DeviceMemory, ...] = (),
) -> LoadedDecoder:
    """Load the model folder `path` as `spec` says, on `devices` where they are given.

    Raises InvalidRequest for a setting that cannot be honoured, else ModelLoadFailed or a child of it; nothing
    stays allocated then.
    """
    report(LoadProgress(phase="inspect", done=0, total=1, unit="steps"))
    devices = devices or open_devices(spec)
    refuse_settings(spec, on_cpu=devices[0].device.type == "cpu", simulated=devices[0].simulated)
    config = apply_settings(read_model_config(path), spec)
    checkpoint = by_expert(language_model_only(Checkpoint.open(path)), config)
    config = as_stored(config, checkpoint)
    layout = lay_out(config.layers, devices, spec.shares)
    places = [memory.device for memory in layout.memories]
    weights = locate(checkpoint, tensor_shapes(config), config.quantisation)
    if spec.lora is not None:
        weights = merged(weights, locate_factors(spec.lora, config))
    report(LoadProgress(phase="inspect", done=1, total=1, unit="steps"))
    dtype, kernels = _computed_with(spec, config.checkpoint_dtype, places[0], report, cancelled)
    native = kernels.library
    reader = WeightReader(weights, dtype=dtype, report=report, cancelled=cancelled)
    adapter = [spec.lora / name for name in (CONFIG, WEIGHTS)] if spec.lora else []
    files = {*checkpoint.files, path / "config.json", *adapter}
    halves = (
        native is None and places[0].type == "cpu" and keeps_float16(spec, dtype_name(dtype), config.checkpoint_dtype)
    )
    own = nullcontext(OwnWeights())  # halves are opaque
    with (
        own if halves else weight_store(path, files, dtype, places, report, cancelled, native, spec.weights) as store,
        torch.inference_mode(),
    ):
        loader = DecoderLoader(config, reader, layout, dtype, store, native, spec.deterministic, spec.weights, halves)
        decoder = loader.load()
    reader.finish()
    parameters = sum(map(math.prod, tensor_shapes(config).values()))
    return LoadedDecoder(
        decoder=decoder,
        dtype=dtype,
        kernels=kernels,
        layout=layout,
        parameters=parameters,
        active_parameters=parameters - _idle_parameters(config),
        shared_bytes=store.shared_bytes,
        enlarge_pages=store.enlarge_pages,
    )


def pick_dtype(wanted: DtypeName, stored: CheckpointDtype, device: torch.device, *, kernels: bool) -> torch.dtype:
    """The dtype to compute in: as asked; else as stored on CUDA, and on a CPU bfloat16 where it or our `kernels`
    multiply that, else float32."""
    if wanted == "auto":
        wanted = stored if device.type == "cuda" else "bfloat16" if kernels or native_bfloat16() else "float32"
    return _DTYPES[wanted]


def _computed_with(
    spec: ModelSpec,
    stored: CheckpointDtype,
    device: torch.device,
    report: Callable[[LoadProgress], None],
    cancelled: Callable[[], bool],
) -> tuple[torch.dtype, Kernels]:
    """The dtype to compute in, and the kernels. Raises InvalidRequest where `weights` cannot be without them."""
    wanted = _DTYPES.get(spec.dtype, torch.bfloat16)
    kernels = find_kernels(wanted, device, report=report, cancelled=cancelled, native=spec.native)
    if spec.weights != "auto" and kernels.library is None:
        raise InvalidRequest(f"weights is {spec.weights}: {kernels.problem}", param="weights", value=spec.weights)
    return pick_dtype(spec.dtype, stored, device, kernels=kernels.library is not None), kernels


def _idle_parameters(config: ModelConfig) -> int:
    mixtures = (config.traits.experts_of(layer) for layer in range(config.layers))
    return sum(idle_elements(experts, config.hidden_size) for experts in mixtures if experts is not None)
