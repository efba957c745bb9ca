"""Any bytes in place of a safetensors header are tensors or one sentence, at little cost."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.tui.screens.models.table import parameters
from engine.config import ModelSpec
from engine.errors import EngineError
from engine.models.headers import read_header
from engine.models.inspect import inspect, split_into_parts
from engine.placement.model_facts import read_facts
from tests.fakes.bounds import outcome, within_bounds
from tests.fakes.model_folders import write_model
from tests.fakes.mutations import changed, damaged
from tests.fakes.tiny_models import make_tiny_model

pytestmark = pytest.mark.long

SIZES = st.one_of(st.integers(-2, 9), st.integers(), st.sampled_from((2**31, 2**48, 2**63 - 1)))
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(("F32", "BF16", "U8", "I16", "I32", "F4", "BOOL", "F8_E4M3", "X", "")),
        "shape": st.lists(SIZES, max_size=10) | st.lists(st.just(2**63 - 1), min_size=17, max_size=400),
        "data_offsets": st.tuples(SIZES, SIZES),
    }
)
KINDS = ("weight", "q_weight", "q_perm", "q_invperm", "trellis", "suh", "qweight", "scales", "weight_scale", "bias")
NAMES = st.one_of(
    st.text(max_size=20),
    st.builds(
        "{}.{}.{}".format,
        st.sampled_from(("model.layers", "h", "lm_head", "vision", "embed_tokens", "model.layer")),
        st.integers(0, 10**30),
        st.sampled_from(KINDS),
    ),
)
FITTING = st.lists(st.tuples(NAMES, st.sampled_from(("U8", "I8", "F8_E4M3")), st.lists(st.integers(0, 9), max_size=8)))
"""Tensors of a byte a number, which are laid out as the format demands."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("fuzz") / "model")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    made = make_tiny_model(tmp_path_factory.mktemp("whole"), with_tokenizer=False, num_hidden_layers=1)
    return (made / "model.safetensors").read_bytes()


def read(folder: Path, content: bytes) -> bool:
    """All that is read of the folder's header, within bounds; returns whether it is one."""
    file, size = folder / "model.safetensors", len(content)
    file.write_bytes(content)
    found = outcome(lambda: read_header(file), size, EngineError)
    if not isinstance(found, str):
        data_bytes = size - 8 - int.from_bytes(content[:8], "little")
        assert sum(tensor.stored_bytes for tensor in found.values()) == data_bytes
        assert all(tensor.elements <= 2 * data_bytes for tensor in found.values())
        with within_bounds(size):
            split_into_parts(found, 2, 4)
    for backend in ("torch", "exllamav2"):
        with within_bounds(size):
            entry = inspect(folder, lambda quantisation, backend=backend: backend)
        assert parameters(entry)  # what the table makes of it
        assert entry.problem.isprintable()
        assert len(entry.problem) < 1000
        assert "Error: " not in entry.problem, "it was foreseen"
    outcome(lambda: str(read_facts(ModelSpec(path=folder, name="m"))), size, EngineError)
    return not isinstance(found, str)


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@settings(derandomize=True, max_examples=250, deadline=None)
@given(entries=st.dictionaries(NAMES, ENTRIES, max_size=6), data=st.binary(max_size=40))
def test_any_tensors_are_read_or_refused(folder: Path, entries: dict[str, Any], data: bytes) -> None:
    read(folder, with_header(entries, data))


@settings(derandomize=True, max_examples=250, deadline=None)
@given(tensors=FITTING)
def test_tensors_that_are_laid_out_as_the_format_demands_are_read(folder: Path, tensors: Any) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in tensors:
        if name not in header and not any("\ud800" <= character <= "\udfff" for character in name):
            size = 1
            for dimension in shape:
                size *= dimension
            if end + size < 2**20:
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
                end += size
    header.pop("__metadata__", None)
    assert read(folder, with_header(header, bytes(end))) or end == 0


@pytest.mark.parametrize("seed", range(60))
def test_a_real_header_with_other_values_is_read_or_refused(folder: Path, whole: bytes, seed: int) -> None:
    random = Random(seed)
    length = int.from_bytes(whole[:8], "little")
    header = changed(json.loads(whole[8 : 8 + length]), random, times=random.randrange(1, 5))
    read(folder, with_header(header, whole[8 + length :]))


@pytest.mark.parametrize("seed", range(60))
def test_a_real_file_with_other_bytes_is_read_or_refused(folder: Path, whole: bytes, seed: int) -> None:
    random = Random(seed)
    end = 8 + int.from_bytes(whole[:8], "little")
    read(folder, damaged(whole[:end], random, times=random.randrange(1, 5)) + whole[end:])
