"""Which engines are compared, and how each is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OURS = "ours"
"""The venv that this process runs in."""

AMX = "amx_int8"
"""The flag of a CPU on which llama.cpp multiplies quantised weights by tiles."""


@dataclass(frozen=True)
class Row:
    """One engine with one kind of weights: a row of the table.

    venv: where it is installed; its packages are peers/VENV.txt, after a "+" stands how they are built.
    runner: a module of tools.benchmarks.runners.
    convert: what benchmarks/convert makes its folder of, "" where it reads safetensors.
    clients: what it is measured with, () for all.  goal: whether a goal speaks of it.
    needs: a flag without which the CPU makes no difference between this row and another.
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
    goal: bool = False
    needs: str = ""

    @property
    def bits(self) -> int:
        """About how many a weight has."""
        return {"bf16": 16, "int8": 8, "Q8_0": 8, "int4": 4, "Q4_0": 4}[self.weights]

    @property
    def precision(self) -> str:
        """The precision of its linear layers, by its name: weights of fewer bits meet rows that are rounded to 8."""
        return "bf16" if self.bits == 16 else "int8"

    def runs_with(self, clients: Sequence[int]) -> tuple[int, ...]:
        """Those of some numbers of clients that it is measured with."""
        return tuple(count for count in clients if not self.clients or count in self.clients)

    @property
    def packages(self) -> str:
        """The name of what its venv installs."""
        return self.venv.partition("+")[0]


REPAIRED = "llamacpp+amx"
"""llama.cpp built with amx_repair.h, which its AMX kernels need under gcc 12."""

ROWS = (
    Row("ours", "EricLLM Console, in process", "bf16", goal=True),
    Row("ours-http", "EricLLM Console, HTTP streaming", "bf16", mode="http", clients=(32,), goal=True),
    Row("ours-same", "EricLLM Console, --deterministic", "bf16", mode="deterministic", goal=True),
    Row("ours-torch", "EricLLM Console, no compiler", "bf16", environment={"ERICLLM_NATIVE": "0"}, goal=True),
    Row("ours-int8", "EricLLM Console, in process", "int8", mode="int8", goal=True),
    Row("ours-int4", "EricLLM Console, in process", "int4", mode="int4", goal=True),
    Row("openvino", "OpenVINO GenAI", "bf16", "openvino", "openvino", "fp16", "fp16", goal=True),
    Row("openvino-int8", "OpenVINO GenAI", "int8", "openvino", "openvino", "int8", "int8"),
    Row(
        "continuous",
        "transformers, continuous batching",
        "bf16",
        "transformers",
        "transformers",
        "continuous",
        goal=True,
    ),
    Row("generate", "transformers, generate in batches", "bf16", "transformers", "transformers", "generate"),
    Row("llamacpp", "llama.cpp", "bf16", "llamacpp", "llamacpp", "", "bf16"),
    Row("llamacpp-q8", "llama.cpp", "Q8_0", "llamacpp", "llamacpp", "", "q8_0", goal=True),
    Row("llamacpp-q4", "llama.cpp", "Q4_0", "llamacpp", "llamacpp", "", "q4_0", goal=True),
    Row("llamacpp-q8-plain", "llama.cpp, not repacked", "Q8_0", "llamacpp", "llamacpp", "plain", "q8_0", needs=AMX),
    Row("llamacpp-q8-amx", "llama.cpp, AMX repaired", "Q8_0", REPAIRED, "llamacpp", "", "q8_0", goal=True, needs=AMX),
    Row("llamacpp-q4-amx", "llama.cpp, AMX repaired", "Q4_0", REPAIRED, "llamacpp", "", "q4_0", goal=True, needs=AMX),
    Row("ctranslate2", "CTranslate2, in batches", "int8", "ctranslate2", "ctranslate2", "int8", "int8"),
)


@dataclass(frozen=True)
class Ratio:
    """A row's rate over that of the first of others that has one, and what it must reach for (shape, clients)."""

    row: str
    over: tuple[str, ...]
    title: str
    least: Mapping[tuple[str, int], float]


_OVER_OPENVINO = {
    ("135m", 1): 1.4,
    ("135m", 8): 1.4,
    ("135m", 32): 1.6,
    ("0.5b", 1): 1.1,
    ("0.5b", 8): 1.3,
    ("0.5b", 32): 1.5,
}
_OVER_LLAMACPP = {
    ("135m", 1): 1.0,
    ("135m", 8): 1.8,
    ("135m", 32): 3.5,
    ("0.5b", 1): 1.0,
    ("0.5b", 8): 1.8,
    ("0.5b", 32): 2.5,
}
_Q4 = ("llamacpp-q4-amx", "llamacpp-q4")

RATIOS = (
    Ratio("ours", ("openvino",), "ours bf16 / OpenVINO bf16", _OVER_OPENVINO),
    Ratio(
        "ours-torch", ("openvino",), "ours bf16 without a compiler / OpenVINO bf16", dict.fromkeys(_OVER_OPENVINO, 0.9)
    ),
    Ratio("ours-int8", _Q4, "ours int8 / llama.cpp Q4_0", _OVER_LLAMACPP),
    Ratio("ours-int4", _Q4, "ours int4 / llama.cpp Q4_0", _OVER_LLAMACPP),
    Ratio("ours-http", ("ours",), "ours through HTTP / in process", {("135m", 32): 0.93, ("0.5b", 32): 0.93}),
    Ratio("ours-same", ("ours",), "ours with --deterministic / without", {}),
    Ratio("ours", ("continuous",), "ours bf16 / transformers continuous batching", {}),
)


def chosen(keys: Sequence[str] | None, *, goals_only: bool, flags: Sequence[str] = ()) -> tuple[Row, ...]:
    """The rows of these keys; else those that a CPU with such flags can distinguish: all, or those that goals speak of.

    Raises ValueError for a key that is none.
    """
    if keys is None:
        return tuple(row for row in ROWS if (row.goal or not goals_only) and (not row.needs or row.needs in flags))
    unknown = sorted(set(keys) - {row.key for row in ROWS})
    if unknown:
        raise ValueError(f"there is no {', '.join(unknown)}; there are {', '.join(row.key for row in ROWS)}")
    return tuple(row for row in ROWS if row.key in keys)
