"""llama.cpp's own server as the wheel xllamacpp has it: `FILE.gguf PORT SLOTS CONTEXT_TOKENS THREADS`, until killed."""

from __future__ import annotations

import sys
import threading

import xllamacpp


def main(file: str, port: int, slots: int, context_tokens: int, threads: int) -> None:
    """Serve. What slots held is not put aside, as no prompt comes twice."""
    params = xllamacpp.CommonParams()
    params.model.path, params.port = file, port
    params.n_ctx, params.n_parallel, params.n_gpu_layers = context_tokens, slots, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.kv_unified, params.cache_ram_mib, params.verbosity = True, 0, 0
    server = xllamacpp.Server(params)
    print(server.listening_address, file=sys.stderr, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]))
