"""Triton attention over exllamav2's packed pages: what attention over the decoded pages gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.backends.common.kv_format import ApartCodes
from engine.backends.exllamav2.packed_cache import CODE_BITS, rotation
from engine.backends.paged_attention import gathered
from tests.fakes.exllamav2_codes import BITS, PAGE, butterflies, packed, unpacked

triton_attention = pytest.importorskip("engine.backends.paged_attention.triton_attention")
pytestmark = pytest.mark.long

CASES: dict[str, tuple[tuple[int, ...], int, int, int, int, dict[str, Any]]] = {
    "a token each, at the edges of pages": ((1, 255, 256, 257), 1, 64, 8, 8, {}),
    "four heads on a key": ((3, 300), 2, 128, 8, 4, {}),
    "seven heads on a key, drafted": ((20, 2), 8, 128, 7, 4, {}),
    "heads of 192": ((40,), 1, 192, 8, 8, {}),
    "heads of 256": ((300, 1), 1, 256, 4, 2, {}),
    "long contexts in parts": ((1500, 3), 1, 256, 2, 2, {}),
    "a window": ((700, 3), 3, 128, 4, 4, {"window": 130}),
    "soft-caps": ((300, 3), 2, 128, 4, 4, {"softcap": 4.0}),
}
"""Tokens before, new tokens, size of heads, query heads of all keys or of one, key heads, options."""


def test_the_bits_are_those_of_the_library() -> None:
    assert CODE_BITS == BITS


@pytest.mark.parametrize("bits", [8, 4])
def test_heads_are_rotated_as_the_library_rotates_them(bits: int) -> None:
    heads = torch.randint(-8, 8, (5, 192)).half()
    turned = torch.from_numpy(butterflies(heads.numpy().reshape(-1, 64)).reshape(5, 192)).float()
    if bits == 4:
        turned = torch.cat([turned[:, ::2], turned[:, 1::2]], 1)
    assert torch.equal(heads.float() @ rotation(192, bits), turned)
    assert torch.equal(turned @ rotation(192, bits).T / 32, heads.float())


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_stand_for_the_heads_that_they_were_made_of(bits: int) -> None:
    heads = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).half().numpy()
    heads[3] = 0
    found = unpacked(*packed(heads, bits), bits)
    assert abs(found - heads).max() < (0.05 if bits == 8 else 0.4)
    assert not found[3].any()


@pytest.mark.parametrize("added", [False, True], ids=["counted", "added"])
@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("case", list(CASES))
def test_packed_pages_give_what_decoded_ones_give(case: str, bits: int, added: bool) -> None:
    before, q_len, size, heads, kv_heads, options = CASES[case]
    heads = heads if heads % kv_heads == 0 else heads * kv_heads
    drawn = torch.Generator().manual_seed(bits)
    width = -(-(max(before) + q_len) // PAGE)
    pages = len(before) * width + 1
    table = (torch.randperm(pages - 1, generator=drawn) + 1).int().view(len(before), width)
    lengths = torch.tensor(before, dtype=torch.int32)
    totals = lengths + q_len
    codes, scales, plain = [], [], []
    for each in BITS[bits]:
        stored = torch.randn(pages, PAGE, kv_heads, size, generator=drawn).half().numpy()
        made = packed(stored, each)
        plain.append(torch.from_numpy(unpacked(*made, each)))
        codes.append(torch.from_numpy(made[0]).view(torch.int8))
        scales.append(torch.from_numpy(made[1]).clone())
        used = torch.zeros(pages, PAGE, dtype=torch.bool)
        for row, total in zip(table, totals.tolist(), strict=True):
            for position in range(total):
                used[row[position // PAGE], position % PAGE] = True
        scales[-1][~used] = torch.nan
        plain[-1][~used] = torch.nan
    q = 2 * torch.randn(len(before), q_len, heads, size, generator=drawn).half()
    form = ApartCodes(size, *BITS[bits])
    turn, back = rotation(size, form.bits).half() / 8, rotation(size, form.v_bits).T.half() / 32
    found = triton_attention.TritonAttention().attend_apart(
        q @ turn,
        tuple(codes),
        tuple(scales),
        lengths if added else totals,
        table,
        form=form,
        added=q_len if added else 0,
        scale=size**-0.5 / 4,
        **options,
    )
    expected = gathered.paged_attention(
        q.float(), None, None, plain[0].float(), plain[1].float(), totals, table, scale=size**-0.5, **options
    )
    torch.testing.assert_close((found @ back).float(), expected, atol=4e-3, rtol=4e-3)


def test_tensors_that_do_not_go_together_are_refused() -> None:
    attention, form = triton_attention.TritonAttention(), ApartCodes(64, 8, 8)
    q, codes = torch.zeros(1, 1, 8, 64).half(), torch.zeros(2, PAGE, 8, 64, dtype=torch.int8)
    scales, lengths = torch.zeros(2, PAGE, 8, 2).half(), torch.ones(1, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    options: dict[str, Any] = {"form": form, "added": 0, "scale": 1.0}
    with pytest.raises(ValueError, match="do not go with"):
        attention.attend_apart(q, (codes[..., :32], codes), (scales, scales), lengths, table, **options)
    with pytest.raises(ValueError, match="must be dense"):
        attention.attend_apart(q, (codes, codes), (scales[..., ::2], scales), lengths, table, **options)
