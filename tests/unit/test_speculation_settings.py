"""Which guessing the torch backend takes, and which it refuses by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends.common.torch_load_settings import refuse_settings
from engine.config import ModelSpec
from engine.errors import InvalidRequest


def spec(**changes: object) -> ModelSpec:
    return ModelSpec(path=Path("/m"), name="m", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [{"ngram_draft": True}, {"draft_model": Path("/d")}])
def test_guessing_from_the_text_and_with_a_model_is_taken(source: dict[str, object]) -> None:
    refuse_settings(spec(**source, draft_tokens=3), on_cpu=True)


def test_a_number_of_guesses_with_nothing_to_guess_with_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as refused:
        refuse_settings(spec(draft_tokens=3), on_cpu=True)
    assert refused.value.details["param"] == "draft_tokens"
