"""Whether two models mean the same by a token id."""

from __future__ import annotations

from pathlib import Path

from engine.errors import UnsupportedModel


def refuse_other_vocabulary(main: Path, draft: Path) -> None:
    """Raise UnsupportedModel where the token ids of the folder `draft` mean other texts than those of `main`. Folders
    neither of which has a tokenizer are not told apart."""
    if _vocabulary(main) != _vocabulary(draft):
        raise UnsupportedModel(
            f"the draft model {draft.name} has another vocabulary than {main.name}, so it cannot guess for it"
        )


def _vocabulary(folder: Path) -> dict[str, int] | None:
    from engine.text.tokenizer_file import read_tokenizer  # it imports the library

    try:
        return read_tokenizer(folder / "tokenizer.json").get_vocab(with_added_tokens=True)
    except FileNotFoundError:
        return None
