"""Our attention in flash-attn's place: the real library, imported on a CPU, computes with it, and rightly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from engine.backends.common.exllamav2_checkpoint import ARCHITECTURES
from engine.backends.exllamav2.attention import (
    FlashAttention,
    dense_attention,
    install,
    install_flash,
    model_needs,
)
from engine.backends.paged_attention.interface import implementation
from engine.errors import UnsupportedModel
from tests.fakes.exllamav2_wheel import wheel_folder
from tests.fakes.tiny_models import make_tiny_model

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
LAYERS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tests.fakes.exllamav2_on_cpu` finds."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", dtype="float16")
    command = [sys.executable, "-m", "tests.fakes.exllamav2_on_cpu", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", ["plain", "window", "softcap", "window and softcap"])
@pytest.mark.parametrize("way", ["batch", "decode", "sequential", "unpaged", "unpaged from nothing"])
def test_the_library_computes_right_through_ours(found: dict[str, Any], model: str, way: str) -> None:
    assert found["errors"][model][way] < 1e-5


def test_the_library_batches_where_ours_is_installed(found: dict[str, Any]) -> None:
    assert found["before"] == [False] * 4
    assert found["after"] == [True] * 5
    assert found["other attentions"] == [False, False]


def test_no_call_of_the_library_needs_a_kernel_that_the_load_has_not_compiled(found: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    calls = found["unprepared"]
    assert calls["prepared"] > 4 and calls["more"] == 0
    assert calls["error"] < 4e-3
    assert calls["rises"] and calls["last"][0] == calls["last"][1] > 0


def test_a_vision_tower_is_refused(found: dict[str, Any]) -> None:
    assert found["varlen"] == "UnsupportedModel"


def test_the_real_config_takes_our_settings(found: dict[str, Any]) -> None:
    config = found["config"]
    assert (config["length"], config["alpha"], config["no_flash_attn"]) == (1024, 2.0, False)
    assert config["needs"] == {
        "page_tokens": 256,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "softcap": 0.0,
        "window": None,
    }


def test_bytes_per_module_are_those_that_the_real_modules_count(found: dict[str, Any]) -> None:
    config = found["config"]
    assert config["modules"] == 2 * LAYERS + 3
    assert config["sizes"] == config["footprints"]
    assert sum(config["sizes"]) == config["stored"]
    assert config["unread modules"] == []


def test_the_architectures_are_those_of_the_real_library() -> None:
    source = (wheel_folder() / "exllamav2" / "architecture.py").read_text()
    assert set(re.findall(r'arch_string [!=]= "(\w+)"', source)) == ARCHITECTURES


# --- ours by itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(("new", "known"), [(1, 1), (1, 9), (4, 9), (9, 9)])
def test_dense_attention_is_the_paged_one_without_pages(
    new: int, known: int, softcap: float, window: int | None
) -> None:
    torch.manual_seed(new)
    q, (k, v) = torch.randn(2, new, 6, 8), torch.randn(2, 2, known, 3, 8)
    dense = dense_attention(q, k, v, scale=0.5, window=window, softcap=softcap)
    paged = implementation("gathered")(
        q,
        None,
        None,
        k,
        v,
        torch.tensor([known, known], dtype=torch.int32),
        torch.tensor([[0], [1]], dtype=torch.int32),
        scale=0.5,
        window=window,
        softcap=softcap,
    )
    assert dense.is_contiguous()
    torch.testing.assert_close(dense, paged)


def test_attention_that_is_not_causal_is_refused() -> None:
    ours = FlashAttention(implementation("gathered"))
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(UnsupportedModel):
        ours.dense(q, q, q, causal=False, softmax_scale=1.0)


def test_the_window_of_a_model_counts_its_own_token_too() -> None:
    arch = SimpleNamespace(lm=SimpleNamespace(swa=False, alternating_swa=True))
    config = SimpleNamespace(
        arch=arch,
        sliding_window=4096,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        attn_logit_softcapping=50.0,
    )
    assert model_needs(config) == {
        "page_tokens": 256,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 256,
        "softcap": 50.0,
        "window": 4097,
    }
    arch.lm.alternating_swa = False
    assert model_needs(config)["window"] is None  # the library leaves it out too


def test_the_real_flash_attn_comes_back_where_a_later_load_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_func(q: object, window_size: object = (-1, -1)) -> None: ...

    flash = ModuleType("flash_attn")
    flash.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    flash.flash_attn_with_kvcache = flash.flash_attn_varlen_func = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    attn, model = ModuleType("attn"), ModuleType("model")
    install(attn, model, implementation("gathered"))
    install_flash(attn, model)
    assert attn.flash_attn_func is flash_attn_func
    assert attn.flash_attn_with_kvcache is flash.flash_attn_with_kvcache
    assert (attn.has_flash_attn_with_window, attn.has_flash_attn_with_softcap) == (True, False)
