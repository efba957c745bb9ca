"""load_decoder: from a model folder and the settings of a load to a decoder on its devices."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.backends.base import LoadProgress
from engine.backends.checkpoints.checkpoint import Checkpoint, TensorInfo
from engine.backends.checkpoints.quantized_tensors import by
from engine.backends.common.families import architectures
from engine.backends.common.families.experts import ExpertNames, idle_elements
from engine.backends.common.gguf_codes import CODED_FORMATS, NO_CODES, CodedTensors, computes_from_codes
from engine.backends.common.model_config import WHOLE_MODEL, CheckpointDtype, ModelConfig, read_model_config
from engine.backends.common.packed_codes import packed_codes
from engine.backends.common.packed_weights import keeps_float16
from engine.backends.common.sharding import shard_config, tensor_parts
from engine.backends.common.tensor_shapes import language_model_name, tensor_shapes
from engine.backends.common.torch_load_settings import apply_settings, refuse_settings
from engine.backends.torch.cuda.gguf_matrix import gguf_kernels_problem
from engine.backends.torch.cuda.grouped_experts import experts_problem
from engine.backends.torch.cuda.layer_ops import DTYPES, LayerOps, layer_ops_problem
from engine.backends.torch.cuda.packed_matrix import packed_kernels_problem
from engine.backends.torch.device_memory import DeviceMemory, open_devices
from engine.backends.torch.layout import Layout, split_layers
from engine.backends.torch.model.decoder import Decoder
from engine.backends.torch.model.linear import dtype_name, native_bfloat16
from engine.backends.torch.model.parallel import CallHead, Group
from engine.backends.torch.native.library import Kernels, find_kernels
from engine.backends.torch.weights.adapters import locate_factors, merge_adapter
from engine.backends.torch.weights.decoder_loader import DecoderLoader, match_checkpoint
from engine.backends.torch.weights.reader import WeightReader, locate_weights, weight_parts
from engine.backends.torch.weights.shared import StoredWeights, weight_store
from engine.backends.torch.weights.store import OwnWeights
from engine.config import DtypeName, ModelSpec
from engine.errors import InvalidRequest, LoadCancelled, ModelLoadFailed
from engine.models.adapters import CONFIG, WEIGHTS
from engine.models.gguf.file import is_gguf


def language_model_only(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with the language model's tensors under the names of a text-only model."""
    renamed: dict[str, TensorInfo] = {}
    for name in checkpoint:
        if plain := language_model_name(name):
            renamed[plain] = replace(checkpoint.info(name), stored_as=name)
    return checkpoint.with_pieces(renamed) if renamed else checkpoint


# Checkpoints with all experts of a layer in one tensor, with names as if each expert had its own.

_ROUTER = "mlp.gate.weight"
_GATE_UP = "mlp.experts.gate_up_proj"
"""[experts, 2 * inner, hidden], each expert's gate first."""

_DOWN = "mlp.experts.down_proj"
"""[experts, hidden, inner]."""


def by_expert(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """Return `checkpoint` with fused experts under separate names. Raises ModelLoadFailed, naming a tensor of another
    shape."""
    if config.traits.experts is None:
        return checkpoint
    names = architectures()[config.architecture].names
    renamed: dict[str, TensorInfo] = {}
    for layer in map(names.layer.format, range(config.layers)):
        if f"{layer}.{_GATE_UP}" in checkpoint:
            renamed |= {f"{layer}.{name}.weight": info for name, info in _pieces(checkpoint, layer, names.experts)}
    return checkpoint.with_pieces(renamed)


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


_logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """A decoder with weights of `dtype` on the devices of `layout`, which count them.

    config: of all of the model, where the decoder is a rank's part of it, as one of `group`.
    kernels: the native kernels of its linear layers, and maybe of its attention.
    parameters: their number; active_parameters: those that one token is computed with.
    shared_bytes: of the weights, once for all workers of this machine.
    enlarge_pages: backs the weights with large pages, in the background; for when the load is over.
    """

    config: ModelConfig
    decoder: Decoder
    dtype: torch.dtype
    kernels: Kernels
    layout: Layout
    parameters: int
    active_parameters: int
    shared_bytes: int
    enlarge_pages: Callable[[], None]
    group: Group | None = None


def load_decoder(
    path: Path,
    spec: ModelSpec,
    *,
    report: Callable[[LoadProgress], None],
    cancelled: Callable[[], bool],
    devices: tuple[DeviceMemory, ...] = (),
    group: Group | None = None,
    call_head: CallHead = lambda rows: None,
) -> LoadedDecoder:
    """Load the model folder `path` with the settings of `spec`, on `devices` if given; a rank's part of it with the
    `group` of that rank. call_head: of ParallelHead.

    Raises InvalidRequest for a setting that cannot be applied, else ModelLoadFailed or a subclass; nothing stays
    allocated then.
    """
    report(LoadProgress(phase="inspect", done=0, total=1, unit="steps"))
    devices = devices or open_devices(spec)
    refuse_settings(spec, on_cpu=devices[0].device.type == "cpu", simulated=devices[0].simulated)
    config = apply_settings(read_model_config(path), spec)
    checkpoint = by_expert(language_model_only(Checkpoint.open(path)), config)
    whole = match_checkpoint(config, checkpoint)
    shard = group.shard if group is not None else WHOLE_MODEL
    config = shard_config(whole, shard)
    layout = split_layers(config.layers, devices, spec.shares)
    devices_used = [memory.device for memory in layout.memories]
    weights = locate_weights(checkpoint, tensor_shapes(whole), whole.quantisation)
    if spec.lora is not None:
        weights = merge_adapter(weights, locate_factors(spec.lora, whole))
    weights = weight_parts(weights, tensor_parts(whole, shard))
    report(LoadProgress(phase="inspect", done=1, total=1, unit="steps"))
    dtype, kernels = _pick_kernels(spec, config.checkpoint_dtype, devices_used[0], report, cancelled)
    native = kernels.library
    reader = WeightReader(weights, dtype=dtype, report=report, cancelled=cancelled)
    adapter = [spec.lora / name for name in (CONFIG, WEIGHTS)] if spec.lora else []
    files = {*checkpoint.files, *adapter, *(() if is_gguf(path) else (path / "config.json",))}
    keep_fp16 = (
        native is None
        and devices_used[0].type == "cpu"
        and keeps_float16(spec, dtype_name(dtype), config.checkpoint_dtype)
    )
    if native is not None and not devices[0].simulated and computes_from_codes(spec):
        coded = CodedTensors.of(checkpoint.pieces())
    else:
        coded = _cuda_codes(spec, config, checkpoint, dtype, devices_used, report, cancelled)
    ops = _layer_ops(config, dtype, devices_used, report)
    stored: StoredWeights = "codes" if coded else spec.weights
    own_weights = nullcontext(OwnWeights())  # float16 weights of FBGEMM cannot be shared
    with (
        own_weights
        if keep_fp16
        else weight_store(path, files, dtype, devices_used, report, cancelled, native, stored, shard) as store,
        torch.inference_mode(),
    ):
        loader = DecoderLoader(
            *(config, reader, layout, dtype, store, native, spec.deterministic, spec.weights, keep_fp16, coded, ops),
            group=group,
            call_head=call_head,
        )
        decoder = loader.load()
    reader.finish()
    parameters = sum(map(math.prod, tensor_shapes(whole).values()))
    return LoadedDecoder(
        config=whole,
        decoder=decoder,
        dtype=dtype,
        kernels=kernels,
        layout=layout,
        parameters=parameters,
        active_parameters=parameters - _idle_parameters(whole),
        shared_bytes=store.shared_bytes,
        enlarge_pages=store.enlarge_pages,
        group=group,
    )


def _cuda_codes(
    spec: ModelSpec,
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    report: Callable[[LoadProgress], None],
    cancelled: Callable[[], bool],
) -> CodedTensors:
    """Return the tensors that are computed from their files' codes on CUDA, once the kernels are compiled and tried
    there; none, with a warning, where they do not work."""
    if devices[0].type != "cuda" or not computes_from_codes(spec, "cuda", dtype=dtype_name(dtype)):
        return NO_CODES
    pieces = checkpoint.pieces()
    if pieces:
        coded = CodedTensors.of(pieces, "cuda")
    else:
        headers = {name: checkpoint.info(name) for name in checkpoint}
        found = {name: (info.shape, info.kind) for name, info in headers.items()}
        coded = packed_codes(found, config.quantisation)
    for number, kind in enumerate(coded.kinds):
        if cancelled():
            raise LoadCancelled("the load was cancelled while kernels were compiled")
        report(LoadProgress(phase="kernels", done=number, total=len(coded.kinds), unit="steps"))
        if kind.format in CODED_FORMATS:
            problem = gguf_kernels_problem(devices, dtype, kind.format)
        else:
            problem = packed_kernels_problem(devices, dtype, kind)
        if problem:
            _logger.warning("weights are decoded at load, not computed from the codes of their files: %s", problem)
            return NO_CODES
    return coded


def _layer_ops(
    config: ModelConfig, dtype: torch.dtype, devices: Sequence[torch.device], report: Callable[[LoadProgress], None]
) -> dict[torch.device, LayerOps]:
    """Return the Triton kernels of a layer for each CUDA device, once they are compiled and tried there; none, with a
    warning, where they do not work."""
    if devices[0].type != "cuda" or dtype not in DTYPES:
        return {}
    report(LoadProgress(phase="kernels", done=0, total=1, unit="steps"))
    traits, experts = config.traits, config.traits.experts
    head_norm = traits.norm if traits.qk_norm in ("head", "each_head") and traits.norm != "layer" else ""
    problem = layer_ops_problem(devices, dtype, config.activation, head_norm, config.rope.rotary_fraction)
    if not problem and experts is not None:
        problem = experts_problem(devices, dtype, config.activation, experts)
    if problem:
        _logger.warning("layers are computed by torch alone, without fused Triton kernels: %s", problem)
        return {}
    report(LoadProgress(phase="kernels", done=1, total=1, unit="steps"))
    return {device: LayerOps(device) for device in devices}


def pick_dtype(wanted: DtypeName, stored: CheckpointDtype, device: torch.device, *, kernels: bool) -> torch.dtype:
    """Return the dtype to compute in: as requested; else as stored on CUDA, and on a CPU bfloat16 where the CPU or the
    native kernels multiply that, else float32."""
    if wanted == "auto":
        wanted = stored if device.type == "cuda" else "bfloat16" if kernels or native_bfloat16() else "float32"
    return _DTYPES[wanted]


def _pick_kernels(
    spec: ModelSpec,
    stored: CheckpointDtype,
    device: torch.device,
    report: Callable[[LoadProgress], None],
    cancelled: Callable[[], bool],
) -> tuple[torch.dtype, Kernels]:
    """Return the dtype to compute in, and the kernels. Raises InvalidRequest where `weights` needs missing ones."""
    wanted = _DTYPES.get(spec.dtype, torch.bfloat16)
    kernels = find_kernels(wanted, device, report=report, cancelled=cancelled, native=spec.native)
    if spec.weights != "auto" and kernels.library is None:
        raise InvalidRequest(f"weights is {spec.weights}: {kernels.problem}", param="weights", value=spec.weights)
    return pick_dtype(spec.dtype, stored, device, kernels=kernels.library is not None), kernels


def _idle_parameters(config: ModelConfig) -> int:
    mixtures = (config.traits.experts_of(layer) for layer in range(config.layers))
    return sum(idle_elements(experts, config.hidden_size) for experts in mixtures if experts is not None)
