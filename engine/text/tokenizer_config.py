"""The files next to tokenizer.json: end tokens, special tokens, chat templates, sampling defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from engine.config import SamplingParams, quote_value
from engine.errors import InvalidRequest, UnsupportedModel
from engine.models.files import decode_json, decode_values, file_names, read_file, read_json_object
from engine.models.gguf.file import GgufModel, is_gguf

TokenToId = Callable[[str], int | None]

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

_MAX_CONFIG_BYTES = 8 * 2**20
"""Of tokenizer_config.json, which describes each added token: of speech models, tens of thousands."""

_MAX_TEMPLATE_BYTES = 2**20
"""Of a file with a chat template. Usual ones have some KiB."""

_MAX_TEMPLATES = 100
"""Files in additional_chat_templates. Folders that have any have one or two."""


_MAX_TOKEN_BYTES = 2**16
"""Of a special token and its description."""

_MAX_IDS = 1000
"""Of end tokens, say. Models have a handful."""


class _TokenizerConfig(msgspec.Struct):
    """The fields of tokenizer_config.json that are read, not decoded yet."""

    bos_token: msgspec.Raw = msgspec.Raw()
    eos_token: msgspec.Raw = msgspec.Raw()
    unk_token: msgspec.Raw = msgspec.Raw()
    pad_token: msgspec.Raw = msgspec.Raw()
    chat_template: msgspec.Raw = msgspec.Raw()


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings that the model's makers recommend (generation_config.json); None where they say nothing.

    temperature is 0.0 (greedy) where they switch sampling off.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def with_values(self, values: Mapping[str, float]) -> GenerationDefaults:
        """The same with other values, by their names."""
        if not values:
            return self
        given = {name: int(value) if name == "top_k" else value for name, value in values.items()}
        return msgspec.structs.replace(self, **given)

    def as_params(self) -> SamplingParams:
        """The settings for a request that says nothing itself; neutral where they say nothing, top_k below 0 is off."""
        given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return SamplingParams(
            max_tokens=given.pop("max_new_tokens", None), **given | {"top_k": max(0, given.get("top_k", 0))}
        )


class TokenizerFolder(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed files of one model folder; {} for those that it lacks."""

    config: Mapping[str, object] = {}
    generation: Mapping[str, object] = {}
    tokenizer: Mapping[str, object] = {}
    template_files: Mapping[str, str] = {}

    @classmethod
    def read(cls, path: Path) -> TokenizerFolder:
        """Read a folder's files, or what a GGUF file has of them; raises UnsupportedModel for one that is broken."""
        if is_gguf(path):
            model = GgufModel(path)
            return cls(config=model.config, generation=model.generation_config(), tokenizer=model.tokenizer_config())
        return cls(
            config=read_json_object(path / "config.json"),
            generation=read_json_object(path / "generation_config.json"),
            tokenizer=_read_tokenizer_config(path / "tokenizer_config.json"),
            template_files=_read_templates(path),
        )

    def bos_token_id(self, token_to_id: TokenToId) -> int | None:
        """The token that texts begin with: the tokenizer's own word first, then the model's."""
        token = self.special_tokens().get("bos_token")
        named = token_to_id(token) if token is not None else None
        if named is not None:
            return named
        return next((i for source in (self.config, self.generation) for i in _ids(source.get("bos_token_id"))), None)

    def eos_token_ids(self, token_to_id: TokenToId) -> tuple[int, ...]:
        """Every end token that any of the files names, in the order of their authority, each once."""
        ids = [*_ids(self.generation.get("eos_token_id")), *_ids(self.config.get("eos_token_id"))]
        text_config = self.config.get("text_config")
        if isinstance(text_config, dict):
            ids += _ids(text_config.get("eos_token_id"))
        token = self.special_tokens().get("eos_token")
        if token is not None and (token_id := token_to_id(token)) is not None:
            ids.append(token_id)
        return tuple(dict.fromkeys(ids))

    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token ... as text: what chat templates call them by."""
        return {name: text for name in _TOKENS if (text := _token_text(self.tokenizer.get(name))) is not None}

    def chat_templates(self) -> dict[str, str]:
        """Template sources by name ("default", "tool_use" ...); a file wins over tokenizer_config.json."""
        return dict(_named_templates(self.tokenizer.get("chat_template"))) | dict(self.template_files)

    def generation_defaults(self) -> GenerationDefaults:
        """The recommended settings; raises UnsupportedModel for one of the wrong type or out of range."""
        values = {field: self.generation.get(field) for field in GenerationDefaults.__struct_fields__}
        if self.generation.get("do_sample") is False:
            values["temperature"] = 0.0
        try:
            defaults = msgspec.convert(values, GenerationDefaults)
            defaults.as_params().validate()
        except msgspec.ValidationError as error:
            raise UnsupportedModel(f"generation_config.json has a wrong setting: {quote_value(str(error))}") from error
        except InvalidRequest as error:
            raise UnsupportedModel(f"generation_config.json is wrong: {error.message}") from error
        return defaults


def _read_templates(path: Path) -> dict[str, str]:
    """Templates in files of their own: chat_template.json (older), chat_template.jinja, additional_chat_templates/."""
    templates = dict(_named_templates(read_json_object(path / "chat_template.json").get("chat_template")))
    files = {file.stem: file for file in _additional_templates(path)}
    files["default"] = path / "chat_template.jinja"
    return templates | {name: _read_template(file, path) for name, file in files.items() if file.is_file()}


def _additional_templates(path: Path) -> list[Path]:
    folder = path / "additional_chat_templates"
    try:
        names = [name for name in file_names(folder) if name.endswith(".jinja")]
    except OSError:
        return []
    if len(names) > _MAX_TEMPLATES:
        raise UnsupportedModel(f"{folder} holds {len(names)} templates; more than {_MAX_TEMPLATES} are not supported")
    return [folder / name for name in names]


def _read_template(file: Path, folder: Path) -> str:
    try:
        return read_file(file, _MAX_TEMPLATE_BYTES, folder).decode()
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise UnsupportedModel(f"a chat template in {folder} cannot be read: {error}") from error


def _read_tokenizer_config(file: Path) -> dict[str, object]:
    """Those of its settings that are used. Raises UnsupportedModel."""
    try:
        content = read_file(file, _MAX_CONFIG_BYTES)
    except FileNotFoundError:
        return {}
    config = decode_json(content, _TokenizerConfig, file)
    raw = {name: bytes(getattr(config, name)) for name in config.__struct_fields__}
    if any(len(raw[name]) > _MAX_TOKEN_BYTES for name in _TOKENS):
        raise UnsupportedModel(
            f"{file.name} in {file.parent} has a special token of more than {_MAX_TOKEN_BYTES} bytes"
        )
    return {name: decode_values(text, object, file) for name, text in raw.items() if text}


def _named_templates(value: object) -> Iterator[tuple[str, str]]:
    """A template, or a list of {"name", "template"}."""
    if isinstance(value, str):
        yield "default", value
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                yield str(entry.get("name", "default")), entry["template"]


def _token_text(value: object) -> str | None:
    """A token written as "<s>" or {"content": "<s>", ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: object) -> list[int]:
    """Token ids written as 2, [2, 3] or null; not what can be none. Raises UnsupportedModel for too many."""
    values = value if isinstance(value, list) else [value]
    if len(values) > _MAX_IDS:
        raise UnsupportedModel(
            f"a config of the model names {len(values)} tokens as one kind; {_MAX_IDS} are supported"
        )
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31]


# Comparison of two models' vocabularies.


def refuse_other_vocabulary(main: Path, draft: Path) -> None:
    """Raise UnsupportedModel where the token ids of the folder `draft` mean other texts than those of `main`. Folders
    neither of which has a tokenizer count as the same."""
    if _vocabulary(main) != _vocabulary(draft):
        raise UnsupportedModel(f"the draft model {draft.name} and {main.name} have different vocabularies")


def _vocabulary(folder: Path) -> dict[str, int] | None:
    from engine.text.tokenizer_file import read_tokenizer  # it imports the library

    try:
        return read_tokenizer(folder).get_vocab(with_added_tokens=True)
    except FileNotFoundError:
        return None
