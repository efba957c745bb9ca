"""A worker whose requests wait for their grammars: nobody else waits, and whoever leaves is forgotten."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from engine.backends.base import BackendRequest
from engine.config import Grammar
from engine.errors import InvalidRequest
from engine.text.grammar import GrammarMask, GrammarMasks
from engine.text.tokenizer import Tokenizer
from engine.worker_process.hosts import ThreadHost
from engine.worker_process.protocol import Cancel
from tests.fakes.backend import PATIENCE_S, FakeBackend, saying
from tests.fakes.model import EOS_ID, write_fake_model
from tests.fakes.worker import Probe, submit_command

DIGITS = Grammar(kind="regex", source="[0-9]{3}")
NAME = Grammar(kind="json_schema", source=json.dumps({"enum": ["Ada Lovelace", "Ada Byron"]}))


class Slow:
    """Grammars that are compiled when the test says so. begun: requests whose grammars are asked for."""

    def __init__(self) -> None:
        self.begun: dict[str, tuple[BackendRequest, Future[GrammarMask]]] = {}

    def compile(self, request_id: str, masks: GrammarMasks) -> None:
        """Let one be done."""
        request, future = self.begun[request_id]
        future.set_result(_begin(masks, request).result(60.0))


_begin = GrammarMasks.begin


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    """In place of the compiler of every worker."""
    compiler = Slow()

    def begin(masks: GrammarMasks, request: BackendRequest) -> Future[GrammarMask]:
        future: Future[GrammarMask] = Future()
        compiler.begun[request.id] = (request, future)
        return future

    monkeypatch.setattr(GrammarMasks, "begin", begin)
    return compiler


@pytest.fixture
async def probe(tmp_path: Path, backend: FakeBackend) -> AsyncIterator[Probe]:
    """A worker with the fake model."""
    probe = await Probe(ThreadHost("w0", backend_factory=lambda spec: backend)).start()
    await probe.load(write_fake_model(tmp_path / "fake"))
    yield probe
    await probe.host.stop(PATIENCE_S)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


async def test_others_are_answered_while_a_grammar_is_compiled(probe: Probe, slow: Slow, backend: FakeBackend) -> None:
    probe.send(submit_command("held", grammar=DIGITS), submit_command("free"))
    assert (await probe.answer("free"))[1].finish == "length"
    slow.begun["held"][1].set_exception(InvalidRequest("no", param="guided_regex"))
    _, last = await probe.answer("held")
    assert last.error is not None
    assert last.error.details == {"param": "guided_regex"}
    assert [request.id for request in backend.submitted] == ["free"]


async def test_a_grammar_that_is_compiled_wakes_a_worker_with_nothing_else_to_do(
    probe: Probe, slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker_process.loop.HEARTBEAT_S", 3600.0)
    probe.send(submit_command("held", grammar=DIGITS), submit_command("free"))
    await probe.answer("free")
    slow.compile("held", GrammarMasks(Tokenizer.from_folder(tmp_path / "fake"), 257))
    assert (await probe.answer("held"))[1].finish == "stop"


async def test_a_request_that_leaves_meanwhile_never_reaches_the_backend(
    probe: Probe, slow: Slow, backend: FakeBackend
) -> None:
    probe.send(submit_command("gone", grammar=DIGITS), submit_command("first"))
    await probe.answer("first")
    probe.send(Cancel(request_id="gone"), submit_command("second"))
    await probe.answer("second")
    slow.begun["gone"][1].set_exception(AssertionError("nobody asks"))
    probe.send(submit_command("third"))
    await probe.answer("third")
    assert [request.id for request in backend.submitted] == ["first", "second", "third"]


async def test_a_failed_step_fails_those_in_it_and_not_those_that_wait(
    probe: Probe, slow: Slow, backend: FakeBackend, tmp_path: Path
) -> None:
    backend.fail_at_steps = frozenset({1})
    probe.send(submit_command("held", grammar=DIGITS), submit_command("free"))
    assert (await probe.answer("free"))[1].finish == "error"
    slow.compile("held", GrammarMasks(Tokenizer.from_folder(tmp_path / "fake"), 257))
    text, last = await probe.answer("held")
    assert (last.finish, len(text), text.isdigit()) == ("stop", 3, True)


@pytest.mark.parametrize("backend", [FakeBackend(reply=saying('"Ada Lovelace"', then=EOS_ID))])
async def test_a_banned_string_is_gone_round_within_the_grammar(probe: Probe, backend: FakeBackend) -> None:
    probe.send(submit_command("a", grammar=NAME, banned_strings=("LOVE",), max_tokens=60))
    text, last = await probe.answer("a")
    assert (text, last.finish) == ('"Ada Byron"', "stop")


def choice(*texts: str) -> Grammar:
    return Grammar(kind="choice", source=json.dumps(texts), param="guided_choice")


def enum(*texts: str) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps({"enum": texts}), param="response_format")


EITHER = Grammar(kind="regex", source="abc|abd|xyz", param="guided_regex")


@pytest.mark.parametrize("banned", ["z", "yz", "XYZ"])
@pytest.mark.parametrize(
    ("grammar", "backend"),
    [
        (choice("abc", "abd", "xyz"), FakeBackend(reply=saying("xyz", then=EOS_ID))),
        (EITHER, FakeBackend(reply=saying("xyz", then=EOS_ID))),
        (enum("abc", "abd", "xyz"), FakeBackend(reply=saying('"xyz"', then=EOS_ID))),
    ],
    ids=["choice", "regex", "enum"],
)
async def test_a_way_that_can_only_end_in_a_banned_string_is_not_begun(
    probe: Probe, backend: FakeBackend, grammar: Grammar, banned: str
) -> None:
    probe.send(submit_command("a", grammar=grammar, banned_strings=(banned,), max_tokens=60))
    text, last = await probe.answer("a")
    assert last.error is None
    assert (text.strip('"'), last.finish) == ("abc", "stop")


@pytest.mark.parametrize("backend", [FakeBackend(reply=saying("xaz", then=EOS_ID))])
async def test_the_start_of_a_banned_string_is_taken_back_where_nothing_else_can_follow(
    probe: Probe, backend: FakeBackend
) -> None:
    grammar = Grammar(kind="regex", source="x(a[zb]|c)", param="guided_regex")
    probe.send(submit_command("a", grammar=grammar, banned_strings=("all", "z", "B"), max_tokens=60))
    text, last = await probe.answer("a")
    assert (text, last.finish, last.error) == ("xc", "stop", None)


@pytest.mark.parametrize("backend", [FakeBackend(reply=saying("xaz", then=EOS_ID))])
@pytest.mark.parametrize(
    ("grammar", "banned", "streamed", "message"),
    [
        (EITHER, ("a", "x"), "", "guided_regex allow no token at output position 1: no other token"),
        (
            Grammar(kind="regex", source="x[ab]z", param="regex"),
            ("z",),
            "x",
            "regex allow no token at output position 2",
        ),
        (choice("xa", "xb"), ("X",), "", "every guided_choice contains one of banned_strings"),
    ],
)
async def test_where_banned_strings_leave_no_way_the_error_names_them_and_the_grammar(
    probe: Probe, backend: FakeBackend, grammar: Grammar, banned: tuple[str, ...], streamed: str, message: str
) -> None:
    probe.send(submit_command("a", grammar=grammar, banned_strings=banned, max_tokens=60))
    text, last = await probe.answer("a")
    assert (text, last.finish) == (streamed, "error")
    assert last.error is not None
    assert (last.error.code, last.error.details["param"]) == ("invalid_request", "banned_strings")
    assert message in last.error.message


@pytest.mark.parametrize("backend", [FakeBackend(reply=saying('{"p', then=EOS_ID))])
async def test_a_grammar_that_proves_too_large_for_its_masks_is_the_requests_fault(
    probe: Probe, backend: FakeBackend
) -> None:
    schema = {"properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}
    grammar = Grammar(kind="json_schema", source=json.dumps(schema), param="guided_json")
    probe.send(submit_command("a", grammar=grammar, max_tokens=60))
    _, last = await probe.answer("a")
    assert last.error is not None
    assert (last.error.code, last.error.details["param"]) == ("invalid_request", "guided_json")
    assert "guided_json is not a supported JSON schema" in last.error.message


@pytest.mark.parametrize("backend", [FakeBackend(reply=saying("xyz", then=EOS_ID))])
async def test_a_stop_string_may_end_an_answer_before_the_banned_string_in_it(
    probe: Probe, backend: FakeBackend
) -> None:
    params = {"banned_strings": ("z",), "stop": ("y",), "max_tokens": 60}
    probe.send(submit_command("a", grammar=choice("abc", "xyz"), **params))
    text, last = await probe.answer("a")
    assert (text, last.finish) == ("x", "stop")


@pytest.mark.parametrize("generated", ['"Ada', '"Ada Lovelace'])
async def test_a_request_from_another_worker_goes_on_within_its_grammar(probe: Probe, generated: str) -> None:
    probe.send(submit_command("a", generated=generated, grammar=NAME, max_tokens=60))
    text, last = await probe.answer("a")
    assert json.loads(generated + text) in ("Ada Lovelace", "Ada Byron")
    assert last.finish == "stop"


async def test_a_whole_answer_that_came_along_ends_with_an_end_token(probe: Probe) -> None:
    probe.send(submit_command("a", generated='"Ada Byron"', grammar=NAME, max_tokens=60))
    text, last = await probe.answer("a")
    assert (text, last.finish) == ("", "stop")
