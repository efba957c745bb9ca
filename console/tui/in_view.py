"""The model in view: of several that the engine holds, the one that knobs, chat and the top line are about. Pure."""

from __future__ import annotations

import msgspec

from engine.snapshot import ModelReading, Snapshot, WorkerReading


def model_in_view(snapshot: Snapshot, key: str) -> ModelReading | None:
    """The model of that key, else the first one; None where there is none."""
    chosen = next((model for model in snapshot.models if model.key == key), None)
    return chosen or default_model(snapshot)


def default_model(snapshot: Snapshot) -> ModelReading | None:
    """The model that requests without a name go to; None where there is none."""
    same = (model for model in snapshot.models if model.status == snapshot.status)
    return next(same, next(iter(snapshot.models), None))


def in_view(snapshot: Snapshot, key: str) -> Snapshot:
    """`snapshot` with the state and the knobs of the model of that key; as it is where there is no such model."""
    model = next((model for model in snapshot.models if model.key == key), None)
    if model is None:
        return snapshot
    return msgspec.structs.replace(
        snapshot, status=model.status, target_workers=model.target_workers, max_prompts=model.max_prompts
    )


def next_model_key(snapshot: Snapshot, key: str) -> str:
    """The key of the model that comes after that one, round and round; "" where there is none."""
    keys = [model.key for model in snapshot.models]
    now = model_in_view(snapshot, key)
    return keys[(keys.index(now.key) + 1) % len(keys)] if now is not None else ""


def workers_of(snapshot: Snapshot) -> tuple[WorkerReading, ...]:
    """The workers of the model that `snapshot.status` tells of."""
    spec = snapshot.status.spec
    return tuple(worker for worker in snapshot.workers if spec is None or worker.model in ("", spec.name))


def prompts_limit(snapshot: Snapshot) -> int:
    """What memory was found to allow of max prompts by the worker that has least of it; 0 where it allows them all."""
    limits = [worker.stats.prompts_limit for worker in workers_of(snapshot) if worker.stats.prompts_limit]
    found = min(limits, default=0)
    return found if found < snapshot.max_prompts else 0


def workers_now(snapshot: Snapshot) -> int:
    """How many workers there are while some come or go: those on their first start do not count yet."""
    if snapshot.status.state not in ("ready", "draining"):
        return snapshot.target_workers
    found = workers_of(snapshot)
    coming = sum(worker.state in ("starting", "loading") and not worker.restarts for worker in found)
    return len(found) - coming
