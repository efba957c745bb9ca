"""What the probe asks NVML for is there in the installed library, with as many arguments: tests elsewhere ask a
stand-in, which has whatever it is asked for."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import pytest

from engine.devices import nvml


def questions() -> Iterator[tuple[str, int]]:
    """Each function that the probe calls, and the number of its arguments."""
    for node in ast.walk(ast.parse(inspect.getsource(nvml))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr.startswith("nvml"):
            yield node.func.attr, len(node.args)
        elif node.func.attr == "_ask" and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value), len(node.args) - 1


def test_the_library_has_every_function_that_is_called() -> None:
    pynvml = pytest.importorskip("pynvml")
    asked = set(questions())
    assert len({name for name, _ in asked}) > 30
    for name, count in asked:
        inspect.signature(getattr(pynvml, name)).bind(*[None] * count)


def test_the_library_has_every_constant_and_field_that_is_read() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert pynvml.nvmlEventTypeXidCriticalError == 8
    assert (pynvml.NVML_TEMPERATURE_GPU, pynvml.NVML_ERROR_NOT_SUPPORTED) == (0, 3)
    assert (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC) == (1, 0)
    assert (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM) == (nvml._SM_CLOCK, nvml._MEMORY_CLOCK)
    assert pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX == nvml._NVLINK_SENT
    assert pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX == nvml._NVLINK_RECEIVED
    memory = pynvml.c_nvmlMemory_v2_t()
    memory.version = pynvml.nvmlMemory_v2
    assert (memory.total, memory.free, memory.reserved) == (0, 0, 0)
    size = pynvml.c_nvmlDeviceAttributes()
    assert (size.gpuInstanceSliceCount, size.memorySizeMB) == (0, 0)
