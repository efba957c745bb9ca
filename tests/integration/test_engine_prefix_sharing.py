"""Whose requests share what the workers computed of their prompts, as the settings say; the torch backend computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.backends.torch.backend import TorchBackend
from engine.config import ModelSpec, PrefixSharing
from engine.engine import Engine
from engine.errors import EngineClosed
from tests.fakes.engines import StillProbe, all_ready, ask, config, read
from tests.fakes.tiny_models import make_tiny_model

PAGE = 16
PROMPT = list(range(3, 63))
"""Three full pages, and a part of one."""

A = {"tenant": "a"}
B = {"tenant": "b"}
SALTED = {"cache_salt": "salt"}
SYSTEM = {"shared_tokens": 40}


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    """An engine with two workers, which find a prompt again only where requests go to the one that has it."""
    folder = make_tiny_model(tmp_path / "model")
    engine = Engine(
        config(num_workers=2, page_tokens=PAGE), backend_factory=lambda spec: TorchBackend(), probe=StillProbe()
    )
    await engine.start()
    try:
        await engine.load(ModelSpec(path=folder, name="tiny", threads=1, kv_cache_tokens=4096, dtype="float32"))
        await all_ready(engine)
        yield engine
    finally:
        await engine.close(drain_s=0.0)


async def cached(engine: Engine, **fields: object) -> int:
    """How many tokens of the prompt the cache had."""
    return (await read(engine.submit(ask(PROMPT, max_tokens=1, **fields)))).last.cached_tokens


@pytest.mark.parametrize(
    ("sharing", "first", "second", "found"),
    [
        ("key", A, A, 48),
        ("key", A, B, 0),
        ("key", A, {}, 0),
        ("key", {}, {}, 48),
        ("key", A | SYSTEM, B | SYSTEM, 0),
        ("key", A | SALTED, A | SALTED, 48),
        ("key", A | SALTED, A, 0),
        ("key", A | SALTED, B | SALTED, 0),
        ("key", {"tenant": "a", "cache_salt": "bc"}, {"tenant": "ab", "cache_salt": "c"}, 0),
        ("system", A | SYSTEM, B | SYSTEM, 32),
        ("system", A | SYSTEM, A | SYSTEM, 48),
        ("system", A | SYSTEM, B, 0),
        ("system", A, B | SYSTEM, 0),
        ("system", {}, B | SYSTEM, 0),
        ("system", A | SYSTEM, B | {"shared_tokens": 31}, 16),
        ("system", A | SYSTEM, B | {"shared_tokens": 60}, 32),
        ("system", A | SYSTEM | SALTED, B | SYSTEM | SALTED, 0),
        ("all", A, B, 48),
        ("all", A, {}, 48),
        ("all", A | SALTED, B | SALTED, 48),
        ("all", A | SALTED, B, 0),
    ],
)
async def test_a_prompt_is_found_by_those_who_share_it(
    engine: Engine, sharing: PrefixSharing, first: dict[str, object], second: dict[str, object], found: int
) -> None:
    engine.share_prefixes(sharing)
    assert [await cached(engine, **first), await cached(engine, **second)] == [0, found]


@pytest.mark.parametrize("sharing", ["key", "system"])
async def test_what_all_shared_is_found_by_nobody_once_they_do_not(engine: Engine, sharing: PrefixSharing) -> None:
    engine.share_prefixes("all")
    await cached(engine, **A)
    engine.share_prefixes(sharing)
    assert [await cached(engine, **who, **SYSTEM) for who in (A, B)] == [0, 32 if sharing == "system" else 0]
    engine.share_prefixes("all")
    assert await cached(engine, **B) == 48


async def test_tenants_that_ask_at_once_find_nothing_of_each_other(engine: Engine) -> None:
    asked = [cached(engine, tenant=f"tenant {number}") for number in range(8)]
    assert await asyncio.gather(*asked) == [0] * 8


async def test_a_vector_is_computed_from_a_prompt_of_its_own_tenant(engine: Engine) -> None:
    await read(engine.submit(ask(PROMPT, max_tokens=0, embed=True, **A)))
    assert [await cached(engine, **who) for who in (B, A)] == [0, 48]


async def test_a_closed_engine_shares_nothing_anew(engine: Engine) -> None:
    engine.refuse_new()
    with pytest.raises(EngineClosed):
        engine.share_prefixes("all")
