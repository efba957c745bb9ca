"""`python -m engine.doctor.probe NAME [ARGUMENT]`: import one library, say what it is, as one JSON object on stdout.

Whatever a library prints, natively too, goes to stderr: stdout is taken away before anything is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping

import msgspec

from engine.backends.exllamav2.library import EXTENSION
from engine.config import AttentionName
from engine.doctor.facts import Attention, Exllama, Package, Torch


def probe_torch() -> Torch:
    """torch and the GPUs it sees."""
    try:
        import torch
    except Exception as error:
        return Torch(installed=True, error=first_line(error))
    found = Torch(installed=True, version=str(torch.__version__), cuda=torch.version.cuda or "")
    if not found.cuda:
        return found
    try:
        torch.cuda.init()
        architectures = tuple(torch.cuda.get_arch_list())
        return msgspec.structs.replace(found, gpus=torch.cuda.device_count(), architectures=architectures)
    except Exception as error:
        return msgspec.structs.replace(found, gpu_error=first_line(error))


def probe_package(name: str) -> Package:
    """Any library: its version, or why importing it fails."""
    try:
        module = importlib.import_module(name)
    except Exception as error:
        return Package(installed=True, error=first_line(error))
    return Package(installed=True, version=str(getattr(module, "__version__", "")))


def probe_exllama() -> Exllama:
    """exllamav2 with the kernels that are there already: without any it is not imported, since that compiles them.

    flash-attn is kept out: it is looked at on its own, and a broken one would hide what this is about.
    """
    os.environ["EXLLAMA_NO_FLASH_ATTN"] = "1"
    found = Exllama(installed=True)
    try:
        from engine.backends.exllamav2.library import planned_build

        kept_at = planned_build().workspace / f"{EXTENSION}.so"
        found = msgspec.structs.replace(found, kept_at=str(kept_at))
        if importlib.util.find_spec(EXTENSION) is not None:
            found = msgspec.structs.replace(found, kernels="prebuilt")
        elif kept_at.is_file():
            found = msgspec.structs.replace(found, kernels="kept")
            sys.path.insert(0, str(kept_at.parent))
        else:
            return found
    except Exception as error:
        return msgspec.structs.replace(found, error=first_line(error))
    try:
        importlib.import_module(EXTENSION)
    except Exception as error:
        return msgspec.structs.replace(found, kernels_error=first_line(error))
    try:
        importlib.import_module("exllamav2.generator")
    except Exception as error:
        return msgspec.structs.replace(found, error=first_line(error))
    return found


def probe_attention(wanted: str) -> Attention:
    """The paged attention that `--attention wanted` comes to on the GPUs that torch sees, once it was tried there."""
    import torch

    from engine.backends.paged_attention.probe import engage, probe

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    try:
        choice = engage(msgspec.convert(wanted, AttentionName), probe(*devices), devices)
    except Exception as error:
        return Attention(error=first_line(error))
    return Attention(name=choice.name, reason=choice.reason)


def first_line(error: BaseException) -> str:
    """The first line of what it says, or its class where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__


PROBES: Mapping[str, Callable[..., msgspec.Struct]] = {
    "torch": probe_torch,
    "package": probe_package,
    "exllama": probe_exllama,
    "attention": probe_attention,
}


def main(name: str, *arguments: str) -> None:
    """Write the answer to what stdout was."""
    answer = os.dup(1)
    os.dup2(2, 1)
    os.write(answer, msgspec.json.encode(PROBES[name](*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
