"""Which guessing the torch backend takes, and which it refuses by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends.torch.settings import refuse_settings
from engine.config import ModelSpec
from engine.errors import InvalidRequest


def spec(**changes: object) -> ModelSpec:
    return ModelSpec(path=Path("/m"), name="m", **changes)  # type: ignore[arg-type]


def test_guessing_from_the_text_is_taken() -> None:
    refuse_settings(spec(ngram_draft=True, draft_tokens=3), on_cpu=True)


@pytest.mark.parametrize(
    ("changes", "param"), [({"draft_model": Path("/d")}, "draft_model"), ({"draft_tokens": 3}, "draft_tokens")]
)
def test_what_it_cannot_guess_with_is_refused_by_name(changes: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        refuse_settings(spec(**changes), on_cpu=True)
    assert refused.value.details["param"] == param
