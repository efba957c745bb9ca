"""llama.cpp's own server as an oracle, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

Ask = Callable[[str, Mapping[str, Any]], dict[str, Any]]

_TIMEOUT_S = 300.0


@contextmanager
def llama_cpp(file: Path) -> Iterator[Ask]:
    """Serve a GGUF file; what is given sends a body to a path of the server, and returns the answer."""
    with llama_cpps(file) as (asking,):
        yield asking


@contextmanager
def llama_cpps(*files: Path) -> Iterator[list[Ask]]:
    """Serve each of these files, likewise, by one process."""
    command = (sys.executable, "-m", "tests.fakes.llama_cpp", *map(str, files))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            lines = (line.strip() for line in server.stdout if line.startswith("http://"))
            addresses = list(islice(lines, len(files)))
            assert len(addresses) == len(files), "llama.cpp refuses a file"
            yield [partial(_ask, address) for address in addresses]
        finally:
            server.kill()


def _ask(address: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _serve(files: Sequence[str]) -> None:
    servers = list(map(_server, files))
    sys.stdin.read()
    servers.clear()


def _server(file: str) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.port = 2048, 1, 0, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # it spins where others compute too
    params.use_jinja, params.warmup, params.verbosity = True, False, 0
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    return server


if __name__ == "__main__":
    _serve(sys.argv[1:])
