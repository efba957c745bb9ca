"""`ericllm top`: the state of an instance in one line, once or repeatedly, for people and for programs."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

import msgspec

from console import text
from console.cli.remote_args import add_key, add_url, key_of, number, tls_of
from console.link.frames import from_plain
from console.link.remote.http import Address, Instance, OutOfReach, address_of
from console.runtime.output import say, write
from console.text import local_time
from engine.errors import EngineError
from engine.snapshot import ModelState, Snapshot
from engine.text.printable import printable

FAILURE = 1
INTERVAL_S = 2.0
_MAX_LINE = 10_000
"""Characters: several hundred devices, or what an instance says that means harm."""


class DeviceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One device. used_bytes: by all processes.  utilisation: 0..1, None where it is not known."""

    id: str
    name: str
    used_bytes: int
    total_bytes: int
    utilisation: float | None


class TopLine(msgspec.Struct, frozen=True, kw_only=True):
    """One instance at `at` (unix time). model: "" where none is loaded. Times in seconds, None where not measured."""

    at: float
    instance: str
    model: str
    state: ModelState
    models: int
    workers_ready: int
    workers: int
    max_prompts: int
    running: int
    queued: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_p95_s: float | None
    itl_p95_s: float | None
    kv_usage: float
    devices: tuple[DeviceLine, ...]
    error: str = ""
    draining: bool = False


def top(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command; 1 with one sentence where the instance cannot be reached."""
    given = _arguments(argv, parser)
    address = address_of(given.url)
    try:
        asyncio.run(_watch(address, given))
    except EngineError as error:
        say(error.message)
        return FAILURE
    return 0


def line_of(snapshot: Snapshot, instance: str) -> TopLine:
    """Return the line of a snapshot."""
    status = snapshot.status
    return TopLine(
        at=snapshot.at,
        instance=instance,
        model="" if status.spec is None else status.spec.name,
        state=status.state,
        models=len(snapshot.models),
        workers_ready=sum(worker.state == "ready" for worker in snapshot.workers),
        workers=len(snapshot.workers),
        max_prompts=snapshot.max_prompts,
        running=snapshot.running,
        queued=snapshot.queued,
        output_tokens_per_s=snapshot.output_tokens_per_s,
        prompt_tokens_per_s=snapshot.prompt_tokens_per_s,
        ttft_p95_s=snapshot.ttft.p95,
        itl_p95_s=snapshot.itl.p95,
        kv_usage=snapshot.kv_usage,
        devices=tuple(
            DeviceLine(
                id=f"{device.node}/{device.id}" if device.node else device.id,
                name=device.name,
                used_bytes=device.total_bytes - device.free_bytes,
                total_bytes=device.total_bytes,
                utilisation=device.utilisation,
            )
            for device in snapshot.devices
        ),
        error="" if status.error is None else status.error.message,
        draining=snapshot.draining_since is not None,
    )


def as_text(line: TopLine) -> str:
    """For a person."""
    workers = f"{line.workers_ready}/{line.workers} workers × {line.max_prompts}"
    more = f" (+{line.models - 1})" if line.models > 1 else ""
    draining = ", draining" if line.draining else ""
    parts = [
        f"{local_time(line.at)} {line.instance}",
        f"{line.model}{more} {line.state}{draining}".strip(),
        workers,
        f"out {text.rate(line.output_tokens_per_s)} in {text.rate(line.prompt_tokens_per_s)} tok/s",
        f"TTFT p95 {text.seconds(line.ttft_p95_s)}",
        f"ITL p95 {text.seconds(line.itl_p95_s)}",
        f"{line.running} running {line.queued} queued",
        f"KV {text.percent(line.kv_usage)}",
        *(_device(device) for device in line.devices),
    ]
    return printable(" · ".join(parts) + (f" · {line.error}" if line.error else ""))[:_MAX_LINE]


def _device(device: DeviceLine) -> str:
    busy = "" if device.utilisation is None else f" {text.percent(device.utilisation)}"
    unit = text.common_unit((device.total_bytes,))
    used, total = (text.in_unit(each, unit) for each in (device.used_bytes, device.total_bytes))
    return f"{device.id} {used}/{total} {unit}{busy}"


async def _watch(address: Address, given: argparse.Namespace) -> None:
    async with Instance(address, key_of(given), tls_of(given)) as instance:
        left = given.count
        while True:
            line = line_of(await _snapshot(instance), address.name)
            write(msgspec.json.encode(line).decode() if given.as_json else as_text(line), as_json=given.as_json)
            left = None if left is None else left - 1
            if left is not None and left < 1:
                return
            await asyncio.sleep(given.interval)


async def _snapshot(instance: Instance) -> Snapshot:
    try:
        snapshot: Snapshot = from_plain(await instance.get("/admin/snapshot"), Snapshot)
    except msgspec.ValidationError:
        raise OutOfReach(f"{instance.address.name} has a different version than this command") from None
    return snapshot


def _arguments(argv: Sequence[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.description = "Print the state of an instance in one line, once or every few seconds."
    add_url(parser)
    add_key(parser)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object per line")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=number(0.1, 86400), default=None, help="repeat at this interval"
    )
    parser.add_argument("--count", metavar="N", type=number(1, 10**9), default=None, help="number of lines (default 1)")
    given = parser.parse_args(argv)
    if given.count is None and given.interval is None:
        given.count = 1.0
    given.interval = INTERVAL_S if given.interval is None else given.interval
    return given
