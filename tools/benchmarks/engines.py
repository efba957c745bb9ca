"""Which engines are compared, and how each is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import platformdirs

OURS = "ours"
"""The venv that this process runs in."""

SERVER = "server"
"""The runner of servers: it runs in our venv, and starts one in that of its row."""


@dataclass(frozen=True)
class Row:
    """One engine with one kind of weights: a row of the table.

    venv: where it is installed: the packages of peers/VENV.txt, and what peers/VENV.sh builds, where there is one.
    runner: a module of tools.benchmarks.runners; a server's runs in our venv.
    convert: what its model is made into, "" where it reads safetensors.
    clients: numbers that it is measured with, () for all.
    """

    key: str
    engine: str
    weights: str
    venv: str = OURS
    runner: str = OURS
    mode: str = ""
    convert: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    clients: tuple[int, ...] = ()

    @property
    def is_ours(self) -> bool:
        """True for this engine."""
        return self.venv == OURS

    @property
    def bits(self) -> int:
        """About how many a weight has."""
        return {"fp32": 32, "bf16": 16, "int8": 8, "Q8_0": 8, "int4": 4, "Q4_0": 4}[self.weights]

    @property
    def precision(self) -> str:
        """The precision of its linear layers, by its name: weights of fewer bits meet rows that are rounded to 8."""
        return {32: "f32", 16: "bf16"}.get(self.bits, "int8")

    def runs_with(self, clients: int) -> bool:
        """True if it is measured with that many."""
        return not self.clients or clients in self.clients


_CONSOLE = "EricLLM Console"
_NATIVE, _WHEEL = "llama.cpp's server, compiled here", "llama.cpp's server, xllamacpp's wheel"
_ONE = (1,)
_ZIG = {"PATH": "", "XDG_CACHE_HOME": str(platformdirs.user_cache_path("ericllm") / "zig")}
"""No compiler on PATH, and kernels of their own: those compiled by the ziglang package."""

ROWS = (
    Row("ours", f"{_CONSOLE}, in process", "bf16"),
    Row("ours-http", f"{_CONSOLE}, HTTP streaming", "bf16", mode="http"),
    Row("ours-same", f"{_CONSOLE}, --deterministic", "bf16", mode="deterministic"),
    Row("ours-zig", f"{_CONSOLE}, kernels compiled by Zig", "bf16", mode="zig", environment=_ZIG),
    Row("ours-torch", f"{_CONSOLE}, without kernels", "bf16", environment={"ERICLLM_NATIVE": "0"}),
    Row("ours-int8", f"{_CONSOLE}, in process", "int8", mode="int8"),
    Row("ours-int4", f"{_CONSOLE}, in process", "int4", mode="int4"),
    Row("openvino", "OpenVINO GenAI", "bf16", "openvino", "openvino", "fp16", "fp16"),
    Row("openvino-int8", "OpenVINO GenAI", "int8", "openvino", "openvino", "int8", "int8"),
    Row("vllm", "vLLM, HTTP streaming", "bf16", "vllm", SERVER, "vllm"),
    Row("llamacpp", _NATIVE, "bf16", "llamacpp", SERVER, "llamacpp", "bf16"),
    Row("llamacpp-q8", _NATIVE, "Q8_0", "llamacpp", SERVER, "llamacpp", "q8_0"),
    Row("llamacpp-q4", _NATIVE, "Q4_0", "llamacpp", SERVER, "llamacpp", "q4_0"),
    Row("xllamacpp-q8", _WHEEL, "Q8_0", "xllamacpp", SERVER, "xllamacpp", "q8_0"),
    Row("xllamacpp-q4", _WHEEL, "Q4_0", "xllamacpp", SERVER, "xllamacpp", "q4_0"),
    Row("ik-q8", "ik_llama.cpp", "Q8_0", "ik_llamacpp", "ik_llamacpp", "", "q8_0", clients=_ONE),
    Row("ik-q4", "ik_llama.cpp", "Q4_0", "ik_llamacpp", "ik_llamacpp", "", "q4_0", clients=_ONE),
    Row("mistralrs", "mistral.rs", "bf16", "mistralrs", "mistralrs", clients=(1, 8)),
    Row("mistralrs-q4", "mistral.rs", "Q4_0", "mistralrs", "mistralrs", "Q4_0", clients=_ONE),
    Row("onnx-int4", "ONNX Runtime GenAI, in batches", "int4", "onnxruntime", "onnxruntime", "int4", "int4"),
    Row("onnx-fp32", "ONNX Runtime GenAI, in batches", "fp32", "onnxruntime", "onnxruntime", "fp32", "fp32"),
    Row("continuous", "transformers, continuous batching", "bf16", "transformers", "transformers", "continuous"),
    Row("generate", "transformers, generate in batches", "bf16", "transformers", "transformers", "generate"),
    Row("ctranslate2", "CTranslate2, in batches", "int8", "ctranslate2", "ctranslate2", "int8", "int8"),
)


@dataclass(frozen=True)
class Ratio:
    """A row's rate over that of the best of others, and what it must reach for (shape, clients) and prompts of 128."""

    row: str
    over: tuple[str, ...]
    title: str
    least: Mapping[tuple[str, int], float] = field(default_factory=dict)


def _goals(small: Sequence[float], large: Sequence[float]) -> Mapping[tuple[str, int], float]:
    """For 1, 8 and 32 clients of the two shapes."""
    return {
        (shape, clients): goal
        for shape, goals in (("135m", small), ("0.5b", large))
        for clients, goal in zip((1, 8, 32), goals, strict=True)
    }


def _peers(least_bits: int, most_bits: int) -> tuple[str, ...]:
    return tuple(row.key for row in ROWS if not row.is_ours and least_bits <= row.bits <= most_bits)


_QUANTISED = _goals((2.0, 4.0, 4.5), (2.0, 4.0, 4.5))

RATIOS = (
    Ratio("ours", _peers(16, 32), "ours bf16 / best peer, bf16", _goals((2.0, 1.7, 1.5), (1.5, 1.5, 1.3))),
    Ratio("ours-int8", _peers(8, 8), "ours int8 / best peer, 8 bits", _QUANTISED),
    Ratio("ours-int4", _peers(4, 4), "ours int4 / best peer, 4 bits", _QUANTISED),
    Ratio("ours-zig", ("openvino",), "ours bf16 without a compiler / OpenVINO bf16", _goals((1.0,) * 3, (1.0,) * 3)),
    Ratio("ours-torch", ("openvino",), "ours bf16 without kernels / OpenVINO bf16"),
    Ratio("ours-http", ("ours",), "ours through HTTP / in process", {("135m", 32): 0.93, ("0.5b", 32): 0.93}),
    Ratio("ours-same", ("ours",), "ours with --deterministic / without"),
)


def chosen(keys: Sequence[str] | None) -> tuple[Row, ...]:
    """The rows of these keys; all for None. Raises ValueError for a key that is none."""
    unknown = sorted(set(keys or ()) - {row.key for row in ROWS})
    if unknown:
        raise ValueError(f"there is no {', '.join(unknown)}; there are {', '.join(row.key for row in ROWS)}")
    return tuple(row for row in ROWS if keys is None or row.key in keys)
