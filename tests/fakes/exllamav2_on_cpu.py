"""The real exllamav2 in a process without a GPU: its kernels stubbed, its Python run as it is, on float32.

Run as `python -m tests.fakes.exllamav2_on_cpu FOLDER` with a model folder; prints what it found as one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.backends.common.exllama_memory import module_bytes, stored_bytes
from engine.backends.common.exllamav2_checkpoint import read_folder
from engine.backends.exllama.package import environment
from engine.backends.exllamav2 import attention, library, load_plan
from engine.backends.paged_attention.interface import implementation
from engine.backends.paged_attention.triton_attention import TritonAttention
from engine.config import ModelSpec
from tests.fakes.exllamav2_wheel import wheel_folder

PAGE = 256
PAGES = 8
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SCALE = 0.3
FLAGS = ("has_flash_attn", "has_flash_attn_with_paged", "has_flash_attn_with_window", "has_flash_attn_with_softcap")


def main(folder: Path) -> None:
    """Import, install, and see what the library's own code then does."""
    stub_what_needs_a_gpu()
    with environment(**library.NO_ATTENTION):
        library.PACKAGE.load_modules()
    import exllamav2.attn as attn
    import exllamav2.model as model

    before = [getattr(attn, flag) for flag in FLAGS]
    attention.install(attn, model, implementation("gathered"))
    found = {
        "before": before,
        "after": [getattr(attn, flag) for flag in FLAGS] + [model.has_flash_attn],
        "other attentions": [attn.has_xformers, attn.has_lower_right_sdpa],
        "config": read_config(folder),
        "errors": {name: errors_of(attn, **each) for name, each in MODELS.items()},
        "unprepared": unprepared(attn, model),
        "varlen": refusal(attn.flash_attn_varlen_func),
    }
    attn.assert_paged_attn()
    print(json.dumps(found))


def stub_what_needs_a_gpu() -> None:
    """The compiled kernels, and Pillow, which only images need."""
    sys.path.insert(0, str(wheel_folder()))
    for name in ("exllamav2_ext", "PIL", "PIL.Image"):
        sys.modules[name] = ModuleType(name)
    sys.modules["PIL"].Image = sys.modules["PIL.Image"]  # type: ignore[attr-defined]
    sys.modules["PIL.Image"].Image = object  # type: ignore[attr-defined]


def read_config(folder: Path) -> dict[str, Any]:
    """The real config through our settings, and the real modules' sizes."""
    os.environ["EXLLAMA_NO_FLASH_ATTN"] = "1"  # as a user may have it: ours is no flash-attn
    classes = library.library_of_modules()
    source = read_folder(folder)
    config = load_plan.read_config(classes, source)
    spec = ModelSpec(path=folder, name="tiny", alpha_value=2.0)
    length = load_plan.apply_settings(config, spec, attention="gathered", max_sequences=4)
    modules = classes.model(config).modules
    sizes = module_bytes(
        source.tensors, [[*(each.key for each in module.submodules), module.key] for module in modules]
    )
    return {
        "length": length,
        "no_flash_attn": config.no_flash_attn,
        "alpha": config.scale_alpha_value,
        "needs": attention.model_needs(config),
        "modules": len(modules),
        "unread modules": [type(module).__name__ for module, size in zip(modules, sizes, strict=True) if not size],
        "footprints": [module.weight_footprint() for module in modules],
        "sizes": sizes,
        "stored": stored_bytes(source.tensors),
    }


# --- the library's attention over ours --------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 100},
    "softcap": {"softcap": 5.0},
    "window and softcap": {"window": 300, "softcap": 5.0},
}


def errors_of(attn: ModuleType, window: int = 0, softcap: float | None = None) -> dict[str, float]:
    """The largest difference between what the library computes and the definition, by the way that it takes."""
    layer = layer_of(attn, window, softcap)
    return {
        "batch": paged_error(attn, layer, pasts=[0, 255, 256, 700], new=3, sequential=False),
        "decode": paged_error(attn, layer, pasts=[1, 511], new=1, sequential=False),
        "sequential": paged_error(attn, layer, pasts=[300], new=200, sequential=True),
        "unpaged": unpaged_error(attn, layer, past=333, new=40),
        "unpaged from nothing": unpaged_error(attn, layer, past=0, new=150),
    }


def unprepared(attn: ModuleType, model: ModuleType) -> dict[str, Any]:
    """How many kernels the library's calls need besides those that `attention.prepare` compiled, and how far off it is
    through those that append and that do not. For Triton's interpreter, so most calls are decided and not computed."""
    paged, dtype = TritonAttention(), torch.float16
    launch = paged._launch
    paged._launch = lambda plan, q, *_: q.new_zeros(plan.out_shape)  # type: ignore[method-assign]
    attention.install(attn, model, paged)
    arch = SimpleNamespace(lm=SimpleNamespace(swa=False, alternating_swa=True))
    config = SimpleNamespace(
        arch=arch,
        sliding_window=100,
        attn_logit_softcapping=None,
        head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    reports: list[tuple[int, int]] = []
    attention.prepare(paged, config, [torch.device("cpu")], lambda done, total: reports.append((done, total)))
    prepared = paged.variants
    for window in (0, 100):
        layer = layer_of(attn, window, None)
        for pasts, new in (([0, 255, 700], 3), ([1, 511], 1), ([0, 40], 20), ([0, 300], 150)):
            paged_error(attn, layer, pasts=pasts, new=new, sequential=False, dtype=dtype)
        for past, new in ((700, 1), (3, 1), (300, 5), (300, 200)):
            paged_error(attn, layer, pasts=[past], new=new, sequential=True, dtype=dtype)
    paged._launch = launch  # type: ignore[method-assign]
    errors = [
        paged_error(attn, layer, pasts=pasts, new=2, sequential=len(pasts) == 1, dtype=dtype)
        for pasts in ([0, 30], [30])
    ]
    return {
        "prepared": len(prepared),
        "more": len(paged.variants - prepared),
        "error": max(errors),
        "last": reports[-1],
        "rises": reports == sorted(reports),
    }


def layer_of(
    attn: ModuleType,
    window: int,
    softcap: float | None,
    sizes: tuple[int, int, int] = (HEADS, KV_HEADS, HEAD_DIM),
) -> SimpleNamespace:
    """What `ExLlamaV2Attention.forward_paged` reads of its object: projections that pass on what they are given."""
    from exllamav2.architecture import RopeStyle

    heads, kv_heads, head_dim = sizes

    def project(first: int, number: int) -> SimpleNamespace:
        columns = slice(first * head_dim, (first + number) * head_dim)
        return SimpleNamespace(forward=lambda states, loras: states[..., columns].contiguous())

    config = SimpleNamespace(attn_logit_softcapping=softcap)
    context = SimpleNamespace(sin=[None], cos=[None])
    return SimpleNamespace(
        is_tp=False,
        q_handle=None,
        model=SimpleNamespace(config=config, get_device_context=lambda *_, **__: context),
        layer_idx=0,
        device_idx=None,
        rope_index=0,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        has_norm=False,
        has_residual=False,
        post_layernorm=None,
        q_norm=None,
        archparams=SimpleNamespace(rope_style=RopeStyle.NONE),
        scaling=SCALE,
        sliding_window=window,
        q_proj=project(0, heads),
        k_proj=project(heads, kv_heads),
        v_proj=project(heads + kv_heads, kv_heads),
        o_proj=SimpleNamespace(forward=lambda states, loras: states),
    )


def paged_error(
    attn: ModuleType,
    layer: SimpleNamespace,
    *,
    pasts: list[int],
    new: int,
    sequential: bool,
    dtype: torch.dtype = torch.float32,
) -> float:
    """`forward_paged` on sequences with `pasts` tokens in the cache, in pages that lie in disorder or in a row."""
    from exllamav2 import attn_params

    attn_params.safe_move_tensor = lambda tensor, *_, **__: tensor
    torch.manual_seed(len(pasts) + new)
    keys, values = (torch.randn(1, PAGES * 2 * PAGE, KV_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
    needed = [-(-(past + new) // PAGE) for past in pasts]
    order = iter(range(2, PAGES * 2) if sequential else torch.randperm(PAGES * 2).tolist())
    table = torch.zeros(len(pasts), max(needed), dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
    states = torch.randn(len(pasts), new, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    params = attn_params.PagedParams(
        batch_size=len(pasts),
        block_index=table,
        cache_seqlens=torch.tensor(pasts, dtype=torch.int32),
        max_cache_seqlen=max(pasts),
        page_size=PAGE,
        q_len=new,
    )
    assert params.is_sequential == sequential
    cache = SimpleNamespace(q_block=0, get_kv_state=lambda *_: (keys, values), store_kv_state=lambda *_: None)
    out = attn.ExLlamaV2Attention.forward_paged(layer, states, cache, params)
    differences = []
    for row, past in enumerate(pasts):
        pages = table[row, : needed[row]].long()
        known, seen = (each.view(-1, PAGE, KV_HEADS, HEAD_DIM)[pages].flatten(0, 1) for each in (keys, values))
        q, k, v = states[row].view(new, -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        appended = (known[past : past + new] - k).abs().max() + (seen[past : past + new] - v).abs().max()
        expected = definition(q, known[: past + new], seen[: past + new], layer)
        differences += [appended, (out[row].view(new, HEADS, HEAD_DIM) - expected).abs().max()]
    return float(max(differences))


def unpaged_error(attn: ModuleType, layer: SimpleNamespace, *, past: int, new: int) -> float:
    """`_attn_flash` on slices of a longer cache."""
    from exllamav2.attn_params import Params

    torch.manual_seed(past)
    keys, values = (torch.randn(2, 1024, KV_HEADS, HEAD_DIM)[:, : past + new] for _ in range(2))
    q = torch.randn(2, new, HEADS, HEAD_DIM)
    out = attn.ExLlamaV2Attention._attn_flash(
        layer, 2, new, q, keys, values, Params(2, new, past, None, None), layer.model.config
    )
    expected = torch.stack([definition(*each, layer) for each in zip(q, keys, values, strict=True)])
    return float((out.view(expected.shape) - expected).abs().max())


def definition(q: Tensor, k: Tensor, v: Tensor, layer: SimpleNamespace) -> Tensor:
    """Attention, word for word: q [new, heads, dim] over k, v [known, kv_heads, dim]; flash-attn's window counts the
    keys to the left of the query's own."""
    new, known = len(q), len(k)
    out = torch.empty_like(q)
    for row in range(new):
        position = known - new + row
        first = max(0, position - layer.sliding_window) if layer.sliding_window else 0
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = (k[first : position + 1, group] @ q[row, head]) * SCALE
            softcap = layer.model.config.attn_logit_softcapping
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out[row, head] = scores.softmax(0) @ v[first : position + 1, group]
    return out


def refusal(function: Any) -> str:
    """The type of the error that a call ends with."""
    try:
        function(None, None, None)
    except Exception as error:
        return type(error).__name__
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
