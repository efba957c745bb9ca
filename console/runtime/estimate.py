"""`ericllm estimate MODEL`: what a load with these settings would take of each device, before anything is loaded."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from functools import partial

import msgspec

from console.runtime.loading import backend_for, engine_config, local_folder, refuse_unloadable, requested_spec
from console.settings.schema import Settings, state_dir
from engine.backends.common.torch_load_settings import refuse_settings
from engine.config import BackendKind, DeviceShare, ModelSpec
from engine.devices import computable, new_probe, usable_cores
from engine.errors import EngineError
from engine.models.catalog import ModelEntry
from engine.models.inspect import inspect
from engine.placement.estimate import DeviceEstimate, Estimate, estimate
from engine.placement.load_history import LoadHistoryFile, workload_of
from engine.placement.model_facts import read_facts
from engine.placement.plan import candidates
from engine.snapshot import DeviceReading
from engine.text.printable import printable

WIDEST = 110
_MIB = 2**20
_COLUMNS = (
    ("device", ""),
    ("total", "total_bytes"),
    ("in use", "others_bytes"),
    ("weights", "weights_bytes"),
    ("KV", "kv_bytes"),
    ("working", "working_bytes"),
    ("kept free", "headroom_bytes"),
    ("left", "free_bytes"),
    ("short by", "short_bytes"),
)


def estimate_for(
    settings: Settings,
    devices: Sequence[DeviceReading] | None = None,
    later: Sequence[DeviceReading] = (),
    *,
    library_prompts: int = 0,
) -> Estimate:
    """The estimate for what `settings` ask for. devices: as they are now; None reads them.  later: without the workers
    that would be replaced.  library_prompts: as in EngineConfig.

    Raises ModelNotFound, or a ModelLoadFailed for a folder that cannot be read.
    """
    path = local_folder(settings)
    entry = inspect(path, partial(backend_for, settings))
    spec = requested_spec(settings, settings.model, path, entry.backend)
    config = msgspec.structs.replace(engine_config(settings, None), library_prompts=library_prompts)
    config = config.for_backend(entry.backend)
    usable = _usable(new_probe(config.devices).read() if devices is None else devices, entry.backend)
    estimated = partial(
        estimate,
        read_facts(spec),
        usable,
        spec,
        workers=config.num_workers,
        correct=LoadHistoryFile(state_dir()).read().correction,
        problem=_problem(settings, spec, entry, candidates(usable, spec)[0]),
        cores=usable_cores(),
        later=later,
    )
    found, fewer = estimated(workload=workload_of(config)), config.with_fewer_prompts
    return found if found.fits or fewer is None else estimated(workload=workload_of(fewer))


def as_text(found: Estimate, width: int | None = None) -> str:
    """A table for a terminal of `width` columns, or for a file; nothing but plain characters."""
    wide = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns) if width is None else width
    workers = f"{found.workers} worker{'s' if found.workers > 1 else ''} × {found.max_prompts} max prompts"
    made = "" if found.weights == "auto" else f" with {found.weights} weights"
    head = (
        f"{printable(found.model)}: {found.backend}, {found.dtype}{made}, "
        f"context {found.context_tokens:,} tokens, {workers}",
        f"Per worker: weights {_mib(found.weights_bytes)} MiB, {found.cache_bits}-bit KV cache "
        f"{found.kv_token_bytes / 1024:,.1f} KiB per token.",
    )
    notes = [_calibration_text(found)] if found.learned.loads else []
    if found.simulated:
        notes.append("The devices are simulated: workers compute on the CPU.")
    if found.warning:
        notes.append(found.warning)
    paragraphs = [line for text in (*notes, found.verdict) for line in textwrap.wrap(text, wide)]
    return "\n".join([*head, "", *_table(found.devices), "", *_placements(found), "", *paragraphs])


def as_json(found: Estimate) -> str:
    """The estimate for programs, with its verdict."""
    value = {"can_load": found.can_load, **msgspec.to_builtins(found)}
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _problem(settings: Settings, spec: ModelSpec, entry: ModelEntry, device: DeviceReading) -> str:
    """Why it cannot be loaded on a device of that kind, however much memory there is."""
    try:
        refuse_unloadable(settings, spec, entry)
        if entry.backend == "torch":
            refuse_settings(spec, on_cpu=device.kind != "cuda", simulated=device.kind == "simulated")
    except EngineError as error:
        return error.message.removeprefix(f"{spec.name} cannot be loaded: ")
    return ""


def _usable(devices: Sequence[DeviceReading], backend: BackendKind) -> Sequence[DeviceReading]:
    """Return the devices that the installed torch can compute on; for a library on GPUs all, with any torch."""
    return computable(devices) if backend == "torch" else devices


def _table(devices: Sequence[DeviceEstimate]) -> list[str]:
    """In MiB; the last column only where something is lacking."""
    short = any(device.short_bytes for device in devices)
    columns = _COLUMNS if short else _COLUMNS[:-1]
    rows = [[title for title, _ in columns]]
    for device in devices:
        numbers = [_mib(getattr(device, field)) for _, field in columns[1:]]
        rows.append([f"{device.node}/{device.id}" if device.node else device.id, *numbers])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(wide) for cell, wide in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return [f"{lines[0]}  (MiB)", *lines[1:]]


def _placements(found: Estimate) -> list[str]:
    lines = []
    for number, placement in enumerate(found.placements):
        where = " + ".join(
            f"{share.layers} layer{'s' if share.layers > 1 else ''}{_part(share)} on {share.device}"
            for share in placement.shares
        )
        lines.append(f"w{number}  {where}, KV cache for {placement.kv_tokens:,} tokens")
    return lines


def _part(share: DeviceShare) -> str:
    """Return the part of its layers that a device has with tensor parallelism."""
    if share.ranks == 1:
        return ""
    return f" in {share.ranks} ranks" if share.device.rpartition("/")[2] == "cpu" else f" (1/{share.ranks} of each)"


def _calibration_text(found: Estimate) -> str:
    by = found.learned
    loads = f"{by.loads} earlier load{'s' if by.loads > 1 else ''}"
    return (
        f"Calibrated from {loads} of this model: weights × {by.weights_factor:.2f}, "
        f"working memory {_mib(by.working_bytes)} MiB more per device."
    )


def _mib(size_bytes: int) -> str:
    return f"{-(-size_bytes // _MIB):,}"
