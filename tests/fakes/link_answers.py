"""Answers of a FakeLink until a test scripts others: models, a log, an API that has work, forms of benches."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from console.bench.kinds import PLANS
from console.link.api import ApiReport, ClientReading, DialectReading, Failure, FailureCount, KeyReading
from console.link.benches import BenchField, BenchForm, BenchReport
from console.link.tuning import TuningReport
from engine.config import SamplingParams
from engine.doctor.examine import examine
from engine.models.catalog import ModelEntry
from engine.snapshot import LogEntry
from tests.fakes import estimates, machines
from tests.fakes.scenes import GIB, MIB, NOW

MODELS = (
    ModelEntry(
        name="demo",
        path=Path("/opt/ericllm/demo"),
        origin="built in",
        architecture="LlamaForCausalLM",
        quantisation="",
        dtype="bfloat16",
        parameters=8_400_000,
        weights_bytes=17 * MIB,
        context_tokens=1024,
        chat_template="own",
    ),
    ModelEntry(
        name="NeuralHermes-7B",
        path=Path("/models/NeuralHermes-7B"),
        origin="/models",
        architecture="MistralForCausalLM",
        quantisation="exl2 5.0 bpw",
        dtype="float16",
        parameters=7_241_732_096,
        weights_bytes=int(4.4 * GIB),
        context_tokens=8192,
        chat_template="ChatML",
    ),
    ModelEntry(
        name="old-pickle[v1]",
        path=Path("/models/old-pickle[v1]"),
        origin="/models",
        architecture="GPT2LMHeadModel",
        quantisation="",
        dtype="float32",
        parameters=124_439_808,
        weights_bytes=int(0.5 * GIB),
        context_tokens=1024,
        problem="the weights are pickles; only safetensors are read",
    ),
)

LOGS = (
    LogEntry(at=NOW - 3, level=logging.INFO, source="engine", message="loading NeuralHermes-7B"),
    LogEntry(at=NOW - 2, level=logging.WARNING, source="w0", message="[kernels] compiled in 1.2 s"),
    LogEntry(at=NOW - 1, level=logging.ERROR, source="api", message="port 8000 is taken"),
)

REPORT = ApiReport(
    at=NOW,
    under_way=14,
    requests=4120,
    requests_per_min=214,
    failures_per_min=3,
    per_second=tuple(3 + (at * 7) % 5 + (at > 40) * (at - 40) // 6 for at in range(60)),
    keys=(
        KeyReading(
            name="settings",
            scopes=("admin",),
            last_used_at=NOW - 86_400 * 3,
            requests=12,
            prompt_tokens=900,
            output_tokens=1800,
        ),
        KeyReading(
            name="app",
            scopes=("use",),
            made_at=NOW - 86_400 * 40,
            last_used_at=NOW - 2,
            requests=3871,
            prompt_tokens=2_904_400,
            output_tokens=811_240,
        ),
        KeyReading(name="grafana", scopes=("watch",), made_at=NOW - 86_400 * 9, last_used_at=NOW - 14, requests=235),
        KeyReading(name="night batch", scopes=("use", "watch"), made_at=NOW - 3600),
    ),
    dialects=(
        DialectReading(
            name="openai",
            title="OpenAI",
            routes=("/v1/models", "/v1/models/{name}", "/v1/completions", "/v1/chat/completions"),
            requests=3790,
            example_path="/v1/chat/completions",
            example_body={"messages": [{"role": "user", "content": "Hello"}]},
        ),
        DialectReading(
            name="generate",
            title="EricLLM and vLLM",
            routes=("/generate",),
            on=False,
            requests=81,
            example_path="/generate",
            example_body={"prompt": "Hello"},
        ),
    ),
    clients=(
        ClientReading(
            address="10.0.0.17", key="app", program="OpenAI/Python", under_way=11, requests=1904, since=NOW - 5400
        ),
        ClientReading(address="10.0.0.23", key="app", program="axios/1.7.9", under_way=3, requests=88, since=NOW - 260),
        ClientReading(address="10.0.0.5", key="grafana", program="Prometheus/3.1.0", requests=235, since=NOW - 86_000),
    ),
    failures=(
        Failure(
            at=NOW - 9,
            status=429,
            code="queue_full",
            message="The queue is full: 64 requests wait",
            client="10.0.0.17",
            key="app",
            method="POST",
            path="/v1/chat/completions",
        ),
        Failure(
            at=NOW - 31,
            status=401,
            code="invalid_api_key",
            message="The API key is not valid",
            client="10.0.0.99",
            method="GET",
            path="/v1/models",
        ),
        Failure(
            at=NOW - 44,
            status=400,
            code="context_length_exceeded",
            message="The prompt has 9,120 tokens; with max_tokens 512 that is more than the 8,192 of the model",
            client="10.0.0.23",
            key="app",
            method="POST",
            path="/v1/completions",
        ),
    ),
    failure_counts=(
        FailureCount(status=429, code="queue_full", count=19),
        FailureCount(status=401, code="invalid_api_key", count=4),
        FailureCount(status=400, code="context_length_exceeded", count=2),
    ),
)
"""A server that has work, trouble, and one dialect switched off."""

_REQUESTS = BenchField(name="requests", title="requests", hint="requests of each user", quick="4", full="64")
_FIELDS = {
    "latency": (BenchField(name="prompts", title="prompts", hint="requests that count", quick="3", full="9"),),
    "users": (
        BenchField(name="users", title="users", hint="numbers of users", quick="1,2,4", full="1,2,3,5,7,9"),
        _REQUESTS,
        BenchField(name="repeats", title="repeats", hint="times that everything is measured", quick="1", full="1"),
    ),
}
_FIELDS["serve"] = (
    BenchField(name="requests", title="requests", hint="requests of each rate", quick="16", full="100"),
    BenchField(
        name="prompt_tokens", title="prompt tokens", hint="tokens of a prompt", quick="128", full="128", traced="trace"
    ),
    BenchField(
        name="output_tokens", title="answer tokens", hint="tokens of an answer", quick="32", full="128", traced="trace"
    ),
    BenchField(name="trace", title="trace", hint="file of conversations in ShareGPT's format", quick="", full=""),
)
_NO_SERVER = {
    "grid": "This benchmark turns the knobs of the engine of this process.",
    "load": "This benchmark loads a model.",
}
_REFUSED = {"load": "This benchmark unloads the model, and here it serves others."}
FORMS = tuple(
    BenchForm(
        bench=name,
        measures=plan.sentence(),
        fields=_FIELDS.get(name, () if name in _REFUSED else (_REQUESTS,)),
        refused=_REFUSED.get(name, ""),
        no_server=_NO_SERVER.get(name, ""),
    )
    for name, plan in PLANS.items()
)
"""Some settings of three benches; one is refused, and two of a server."""

ANSWERS: Mapping[str, Any] = {
    "engine.list_models": MODELS,
    "engine.sampling_defaults": SamplingParams(temperature=0.6),
    "engine.diagnose": examine(machines.H100_WITH_EVERYTHING, "exllamav2"),
    "models.estimate": estimates.estimate(),
    "api.report": REPORT,
    "tuning.report": TuningReport(),
    "benches.report": BenchReport(),
    "benches.forms": FORMS,
}
"""By the names of calls in `console.link.rpc`."""
