"""Which form of chat template a model folder has, told by the control tokens that its template writes."""

from __future__ import annotations

from pathlib import Path

from engine.text.folder import TokenizerFolder

OWN = "own"
"""A template of a form that has no name here."""

_FORMS = (
    ("<|im_start|>", "ChatML"),
    ("<|start_header_id|>", "Llama 3"),
    ("<|header_start|>", "Llama 4"),
    ("<start_of_turn>", "Gemma"),
    ("<|START_OF_TURN_TOKEN|>", "Command R"),
    ("<|channel|>", "Harmony"),
    ("<｜Assistant｜>", "DeepSeek"),
    ("<<SYS>>", "Llama 2"),
    ("[INST]", "Mistral"),
    ("<|end|>", "Phi 3"),
    ("<|assistant|>", "Zephyr"),
    ("### Instruction", "Alpaca"),
    ("USER:", "Vicuna"),
)


def chat_template_form(path: Path) -> str:
    """ "ChatML", "Llama 3", ..., "own"; "" where the folder has no template. Raises UnsupportedModel for files that
    cannot be read."""
    templates = TokenizerFolder.read(path).chat_templates()
    source = templates.get("default") or next(iter(templates.values()), "")
    return form_of(source) if source else ""


def form_of(source: str) -> str:
    """The form of a template's source."""
    return next((form for token, form in _FORMS if token in source), OWN)
