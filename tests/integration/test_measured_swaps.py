"""The measurement of a conversation after a swap: it ends well only where the pages and the answer are the same."""

from __future__ import annotations

import sys
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest

from engine.backends.common import kv_tiers
from engine.backends.common.native_build import find_compiler
from engine.backends.common.page_folder import PageFolder
from engine.backends.torch.native.library import native_isa
from engine.config import EngineConfig
from engine.engine import Engine, GenerateRequest
from tests.fakes.tiny_models import make_tiny_model
from tools.performance import kv_tiers as tool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native_isa() is None or not find_compiler(), reason="the kernels do not run here"),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), dtype="bfloat16", head_dim=16)


@pytest.fixture(autouse=True)
def _own_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers in threads, whose host tier is a folder of the test's own, and small tiers."""
    monkeypatch.setattr(tool, "EngineConfig", partial(EngineConfig, worker_host="thread"))
    monkeypatch.setattr(kv_tiers, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(tool, "TIERS", {"host": {"kv_host_gib": 0.05}, "disk": {"kv_disk_gib": 0.05}})


def measured(monkeypatch: pytest.MonkeyPatch, model: Path, *prompts: int, swaps: int = 1) -> int:
    command = ["kv_tiers", "--model", str(model), "--rounds", "0", "--threads", "1", "--swaps", str(swaps)]
    monkeypatch.setattr(sys, "argv", [*command, "--prompts", *map(str, prompts)])
    return tool.main()


def test_swaps_print_a_row_of_each_tier_and_length_that_fits_the_context(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert measured(monkeypatch, llama, 40, 200, 510) == 0
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[:5] == ["tier", "prompt", "recompute", "warm", "reading"]
    assert [row[:2] for row in rows] == [[tier, tokens] for tier in ("host", "disk") for tokens in ("40", "200", "510")]
    for row in rows:
        if row[1] == "510":
            assert " ".join(row[2:]) == "tokens do not fit into the context of 512"
        else:
            assert [float(each) >= 0 for each in row[2:] if each != "ms"] == [True] * 5
    assert not list(tmp_path.glob("ericllm-kv-*/*/")), "pages that were measured are removed"


def test_rows_of_swaps_are_medians_and_the_ratio_of_these(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first_s = cycle((0.3, 0.01, 0.05, 0.1, 0.9, 0.04, 0.5, 0.02, 0.9))  # new, warm and after the swap of three swaps
    reading_s = cycle((0.03, 0.02, 0.8))
    ask, read = tool._ask, tool._read

    async def ask_timed(engine: Engine, request: GenerateRequest) -> tool.Asked:
        return (await ask(engine, request))._replace(first_s=next(first_s))

    monkeypatch.setattr(tool, "_ask", ask_timed)
    monkeypatch.setattr(tool, "_read", lambda *given: (next(reading_s), read(*given)[1]))
    assert measured(monkeypatch, llama, 40, swaps=3) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    expected = ["300.0", "ms", "20.0", "ms", "30.0", "ms", "50.0", "ms", "1.000"]
    assert rows == [["host", "40", *expected], ["disk", "40", *expected]]


def test_swaps_end_with_1_where_an_answer_is_another_one_after_the_swap(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[GenerateRequest] = []
    ask = tool._ask

    async def ask_another(engine: Engine, request: GenerateRequest) -> tool.Asked:
        asked.append(request)
        answer = await ask(engine, request)
        return answer._replace(token_ids=[0, 0, 0, 0]) if len(asked) == 3 else answer

    monkeypatch.setattr(tool, "_ask", ask_another)
    assert measured(monkeypatch, llama, 40) == 1
    assert "host      40 has other answers: [" in (out := capsys.readouterr().out)
    assert out.count("has other answers") == 1


def test_swaps_end_with_1_where_a_tier_has_lost_the_pages(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PageFolder, "write", lambda folder, key, content: None)
    assert measured(monkeypatch, llama, 40) == 1
    said = "has found other tokens (new, warm, read, after the swap) than (0, 32, 32, 32): (0, 32, 0, 0)"
    assert capsys.readouterr().out.count(said) == 2
