"""Banned strings: found whatever their case and however they are split, and gone round without a trace."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.base import BackendRequest, TokenEvent, TokenLogprob, TokenMask
from engine.backends.torch.backend import TorchBackend
from engine.config import Grammar, SamplingParams
from engine.errors import InvalidRequest
from engine.text.grammar import GrammarMasks
from engine.text.output_processor import BannedStrings, OutputProcessor
from engine.text.tokenizer import Tokenizer
from engine.worker_process.hosts import ThreadHost
from engine.worker_process.protocol import RequestOutput
from engine.worker_process.request_state import MAX_TRIES, RequestState
from tests.fakes.backend import PATIENCE_S, FakeBackend, saying
from tests.fakes.model import EOS_ID, write_fake_model
from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.worker import Probe, submit_command

pytestmark = pytest.mark.long

StartWorker = Callable[[FakeBackend], Awaitable[Probe]]


# --- finding --------------------------------------------------------------------------------------------------------


def found(strings: Sequence[str], pieces: Sequence[str]) -> int | None:
    """The piece in which the first banned string begins."""
    subject = BannedStrings(strings)
    return next((at for i, piece in enumerate(pieces) if (at := subject.push(piece, i)) is not None), None)


@pytest.mark.parametrize(
    ("strings", "pieces", "where"),
    [
        (["secret"], ["a ", "sec", "r", "et"], 1),
        (["secret"], ["a SeC", "RET"], 0),
        (["straße"], ["die STRAS", "SE"], 0),
        (["STRASSE"], ["die ", "straß", "e"], 1),
        (["ΣΊΣΥΦΟΣ"], ["ο ", "Σίσυ", "φος"], 1),
        (["naïve"], ["NAÏ", "VE"], 0),
        (["abab!"], ["ab", "ab", "ab", "!"], 1),
        (["xabc", "ab"], ["x", "a", "b"], 1),
        (["bcd", "abcd"], ["a", "b", "c", "d"], 0),
        (["abcz", "bcy"], ["a", "b", "c", "y"], 1),
        (["secret"], ["sec", " ret"], None),
        (["secret"], ["secre"], None),
    ],
)
def test_a_banned_string_is_found_where_it_begins(strings: list[str], pieces: list[str], where: int | None) -> None:
    assert found(strings, pieces) == where


@given(
    strings=st.lists(st.text("abAß", min_size=1, max_size=4), min_size=1, max_size=5),
    pieces=st.lists(st.text("abcAsSß", max_size=4), max_size=12),
)
def test_it_is_the_one_that_is_complete_first_and_of_those_the_longest(strings: list[str], pieces: list[str]) -> None:
    folded = [string.casefold() for string in strings]
    owners = [i for i, piece in enumerate(pieces) for _ in piece.casefold()]
    text = "".join(pieces).casefold()
    ends = ((end, -len(string)) for end in range(1, len(text) + 1) for string in folded if text[:end].endswith(string))
    best = min(ends, default=None)
    assert found(strings, pieces) == (None if best is None else owners[best[0] + best[1]])


@given(
    strings=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    text=st.text("abc", max_size=12),
)
def test_it_is_clear_exactly_where_no_banned_string_has_begun(strings: list[str], text: str) -> None:
    subject = BannedStrings(strings)
    for i in range(len(text)):
        if subject.push(text[i], i) is not None:
            return
        begun = any(text[j : i + 1] == string[: i + 1 - j] for string in strings for j in range(i + 1))
        assert subject.clear == (not begun)


# --- one answer -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("models") / "fake")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def request(generated: bytes = b"", **params: object) -> BackendRequest:
    sampling = SamplingParams(**{"max_tokens": 1000, "seed": 0, **params})  # type: ignore[arg-type]
    return BackendRequest(id="r", prompt_ids=[1], generated=list(generated), params=sampling, end_token_ids=(EOS_ID,))


def texts(tokenizer: Tokenizer, said: str, **params: object) -> list[str | int]:
    """What each byte of `said` and the end bring: text, or the place of a banned string."""
    stage = OutputProcessor(tokenizer, request(**params))
    outputs = [stage.push(token_id) for token_id in [*said.encode(), EOS_ID]]
    return [output.text if output.banned_from is None else output.banned_from for output in outputs]


def test_text_that_may_begin_a_banned_string_is_held_until_it_is_none(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, "a sex", banned_strings=("secret",)) == ["a", " ", "", "", "sex", ""]


def test_the_end_releases_what_was_held(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, "secr", banned_strings=("secret",)) == ["", "", "", "", "secr"]


def test_a_held_token_is_not_settled(tokenizer: Tokenizer) -> None:
    stage = OutputProcessor(tokenizer, request(banned_strings=("secret",)))
    assert [stage.push(token_id).settled for token_id in b"xs!"] == [True, False, True]


def test_a_stop_string_that_is_complete_first_ends_the_answer(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, "abc", stop=("ab",), banned_strings=("abc",))[:2] == ["", ""]
    stage = OutputProcessor(tokenizer, request(stop=("ab",), banned_strings=("abc",)))
    assert [stage.push(token_id).finish for token_id in b"ab"] == [None, "stop"]


def test_a_banned_string_that_only_a_stop_string_completes_is_not_one(tokenizer: Tokenizer) -> None:
    outputs = texts(tokenizer, "xab", stop=("b",), banned_strings=("ab",))
    assert outputs[:2] == ["x", ""]
    assert outputs[2] == "a"
    assert texts(tokenizer, "xab", stop=("b",), include_stop=True, banned_strings=("ab",))[2] == 1


def test_a_banned_string_before_min_tokens_is_banned_all_the_same(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, "xab", min_tokens=9, stop=("x",), banned_strings=("AB",))[2] == 1


def test_a_character_that_begins_in_an_earlier_token_is_taken_back_whole(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, "x😀!", banned_strings=("😀",))[:5] == ["x", "", "", "", 1]


def test_an_answer_resumes_where_tokens_were_settled(tokenizer: Tokenizer) -> None:
    whole, resumed = (OutputProcessor(tokenizer, request(g, banned_strings=("bcd",))) for g in (b"", b"ab"))
    before = "".join(whole.push(token_id).text for token_id in b"ab")
    assert before == "a"
    rest = [*b"cxbc", EOS_ID]
    assert "".join(whole.push(token_id).text for token_id in rest) == "bcxbc"
    assert "".join(resumed.push(token_id).text for token_id in rest) == "bcxbc"


# --- taking back ----------------------------------------------------------------------------------------------------


def event(token_id: int, logprob: float | None = None) -> TokenEvent:
    scored = None if logprob is None else TokenLogprob(token_id=token_id, logprob=logprob)
    return TokenEvent(request_id="r", token_id=token_id, logprob=scored)


def test_each_token_tried_in_a_place_is_ruled_out_there_until_none_are_left(tokenizer: Tokenizer) -> None:
    answer, output = RequestState(tokenizer, request(banned_strings=tuple("abc"))), RequestOutput(request_id="r")
    answer.take(event(ord("x")), output)
    for tried in ("a", "ab", "abc"):
        answer.take(event(ord(tried[-1])), output)
        again = answer.rewound()
        assert (bytes(again.generated), bytes(again.banned_next)) == (b"x", tried.encode())
    answer.take(event(ord("d")), output)
    answer.take(event(ord("a")), output)
    assert (bytes((again := answer.rewound()).generated), bytes(again.banned_next)) == (b"xd", b"a")
    assert (output.text, bytes(output.token_ids)) == ("xd", b"xd")


def test_an_earlier_place_keeps_its_tries_while_a_later_one_is_tried(tokenizer: Tokenizer) -> None:
    answer, output = RequestState(tokenizer, request(banned_strings=("ab", "acd", "d"))), RequestOutput(request_id="r")
    answer.take(event(ord("a")), output)
    answer.take(event(ord("b")), output)
    assert (bytes((again := answer.rewound()).generated), bytes(again.banned_next)) == (b"", b"a")
    answer.take(event(ord("A")), output)
    answer.take(event(ord("d")), output)
    assert (bytes((again := answer.rewound()).generated), bytes(again.banned_next)) == (b"A", b"d")
    answer.take(event(ord("b")), output)
    assert (bytes((again := answer.rewound()).generated), bytes(again.banned_next)) == (b"", b"aA")


def test_a_place_with_too_many_tries_ends_the_request_by_name(tokenizer: Tokenizer) -> None:
    answer, output = RequestState(tokenizer, request(banned_strings=("a",))), RequestOutput(request_id="r")
    for _ in range(MAX_TRIES - 1):
        answer.take(event(ord("a")), output)
        answer.rewound()
    answer.take(event(ord("a")), output)
    with pytest.raises(InvalidRequest, match=f"banned_strings allow no token at output position 1: all {MAX_TRIES}"):
        answer.rewound()


def test_a_backend_with_nothing_left_says_what_was_ruled_out(tokenizer: Tokenizer) -> None:
    answer, output = RequestState(tokenizer, request(banned_strings=("a",))), RequestOutput(request_id="r")
    answer.take(event(ord("a")), output)
    answer.rewound()
    answer.take(TokenEvent(request_id="r", finish="error", message="no finite probabilities"), output)
    assert output.error is not None
    assert output.error.code == "invalid_request"
    expected = "banned_strings allow no token at output position 1: no other token is allowed there"
    assert output.error.message == expected


def test_log_probabilities_are_told_with_their_tokens(tokenizer: Tokenizer) -> None:
    answer, output = RequestState(tokenizer, request(banned_strings=("ab",), logprobs=0)), RequestOutput(request_id="r")
    answer.take(event(ord("a"), -1.0), output)
    assert (output.token_ids, output.logprobs, output.is_empty) == ([], [], True)
    answer.take(event(ord("b"), -2.0), output)
    answer.rewound()
    answer.take(event(ord("c"), -3.0), output)
    assert [(each.token_id, each.logprob) for each in output.logprobs] == [(ord("c"), -3.0)]


# --- the loop -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def start_worker(folder: Path) -> AsyncIterator[StartWorker]:
    """Starts a worker around a backend, with the fake model loaded."""
    started: list[Probe] = []

    async def start(backend: FakeBackend) -> Probe:
        probe = await Probe(ThreadHost(f"w{len(started)}", backend_factory=lambda spec: backend)).start()
        started.append(probe)
        await probe.load(folder)
        return probe

    yield start
    for probe in started:
        await probe.host.stop(PATIENCE_S)


async def outputs_of(probe: Probe, **params: object) -> list[RequestOutput]:
    probe.send(submit_command("r", **{"max_tokens": 60, **params}))
    return [output async for output in probe.outputs("r")]


async def test_the_answer_goes_another_way_and_nothing_of_the_first_is_told(start_worker: StartWorker) -> None:
    backend = FakeBackend(reply=saying("my SECRET word", then=EOS_ID))
    outputs = await outputs_of(await start_worker(backend), banned_strings=("secret",), logprobs=0)
    ids = [token_id for output in outputs for token_id in output.token_ids]
    assert "".join(output.text for output in outputs) == "my TECRET word"
    assert bytes(ids[:-1]) == b"my TECRET word"
    assert [entry.token_id for output in outputs for entry in output.logprobs] == ids
    assert outputs[-1].finish == "stop"
    assert [output.cached_tokens for output in outputs if output.cached_tokens is not None] == [0]
    again = backend.submitted[1]
    assert (bytes(again.generated), bytes(again.banned_next)) == (b"my ", b"S")


async def test_a_banned_string_at_the_last_allowed_token_is_gone_round_too(start_worker: StartWorker) -> None:
    backend = FakeBackend(reply=saying("so bad", then=EOS_ID))
    outputs = await outputs_of(await start_worker(backend), banned_strings=("bad",), max_tokens=6)
    assert "".join(output.text for output in outputs) == "so cad"
    assert (outputs[-1].finish, sum(len(output.token_ids) for output in outputs)) == ("length", 6)


async def test_an_answer_with_no_way_on_ends_with_an_error_that_names_banned_strings(start_worker: StartWorker) -> None:
    class Stubborn(FakeBackend):
        def submit(self, request: BackendRequest, mask: TokenMask | None = None) -> None:
            super().submit(BackendRequest(id=request.id, prompt_ids=request.prompt_ids, params=request.params))

    outputs = await outputs_of(await start_worker(Stubborn(reply=saying("bad"))), banned_strings=("bad",))
    assert outputs[-1].error is not None
    assert outputs[-1].error.code == "invalid_request"
    assert "banned_strings" in outputs[-1].error.message
    assert "".join(output.text for output in outputs) == ""


async def test_the_answers_beside_it_stay_as_they_are(start_worker: StartWorker) -> None:
    backend = FakeBackend(reply=saying("a bad day", then=EOS_ID))
    probe = await start_worker(backend)
    probe.send(submit_command("banned", banned_strings=("bad",), max_tokens=60), submit_command("free", max_tokens=60))
    told = {"banned": "", "free": ""}
    async for output in probe.outputs("banned", "free"):
        told[output.request_id] += output.text
    assert told == {"banned": "a cad day", "free": "a bad day"}


async def test_several_tokens_of_one_step_beyond_a_banned_string_are_dropped(start_worker: StartWorker) -> None:
    class Drafting(FakeBackend):
        def step(self) -> Sequence[TokenEvent]:
            return [*super().step(), *super().step(), *super().step()]

    backend = Drafting(reply=saying("a bad day", then=EOS_ID))
    outputs = await outputs_of(await start_worker(backend), banned_strings=("ba",))
    assert "".join(output.text for output in outputs) == "a cad day"


@settings(max_examples=40, deadline=None)
@given(
    said=st.text("abcAB ", min_size=1, max_size=24),
    banned=st.lists(st.text("abcB", min_size=1, max_size=3), min_size=1, max_size=3),
    stop=st.lists(st.text("abc ", min_size=1, max_size=2), max_size=1),
    cut=st.integers(0, 8),
)
def test_no_delta_ever_holds_a_banned_string_and_what_was_told_stays(
    tokenizer: Tokenizer, said: str, banned: list[str], stop: list[str], cut: int
) -> None:
    """Drives an answer by hand, losing its worker after `cut` tokens were told; the text is that of the tokens."""
    params = {"banned_strings": tuple(banned), "stop": tuple(stop), "max_tokens": 30}
    backend = FakeBackend(reply=saying(said, then=EOS_ID))
    text, ids, asked, lost = "", [], request(**params), False
    answer = RequestState(tokenizer, asked)
    backend.max_prompts = 1
    backend.submit(asked)
    for _ in range(3000):
        output = RequestOutput(request_id="r")
        for each in backend.step():
            answer.take(each, output)
        if answer.rewinding:
            backend.cancel("r")
            backend.submit(answer.rewound())
        text += output.text
        ids += output.token_ids
        if output.finish is not None:
            break
        if not lost and len(ids) >= cut:
            lost = True
            backend.cancel("r")
            asked = request(bytes(ids), **params)
            answer = RequestState(tokenizer, asked)
            backend.submit(asked)
    else:
        pytest.fail("the answer did not end")
    assert not any(string.casefold() in text.casefold() for string in banned)
    shown = OutputProcessor(tokenizer, request(stop=tuple(stop), max_tokens=30))
    assert "".join(shown.push(token_id).text for token_id in ids) == text


# --- the torch backend ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 5, "temperature": 1.3, "top_p": 0.9}], ids=str)
async def test_the_torch_backend_goes_another_way_from_the_same_start(
    tmp_path: Path, params: dict[str, object]
) -> None:
    model = make_tiny_model(tmp_path)
    probe = await Probe(ThreadHost("w", backend_factory=lambda spec: TorchBackend())).start()
    await probe.load(model)
    try:
        plain = await outputs_of(probe, ignore_eos=True, logprobs=0, **params)
        text = "".join(output.text for output in plain)
        banned = text[8:11]
        first, second = [
            await outputs_of(probe, ignore_eos=True, logprobs=0, banned_strings=(banned,), **params) for _ in range(2)
        ]
    finally:
        await probe.host.stop(PATIENCE_S)
    told = "".join(output.text for output in first)
    assert banned.casefold() in text.casefold()
    assert banned.casefold() not in told.casefold()
    assert told == "".join(output.text for output in second)
    ids, other = ([entry.token_id for output in outputs for entry in output.logprobs] for outputs in (plain, first))
    assert len(other) == len(ids) == 60
    changed = next(i for i in range(60) if ids[i] != other[i])
    assert ids[:changed] == other[:changed]
    scores = [[entry.logprob for output in outputs for entry in output.logprobs] for outputs in (plain, first)]
    assert scores[0][:changed] == pytest.approx(scores[1][:changed], abs=1e-4)


# --- within a grammar -----------------------------------------------------------------------------------------------


def to_its_end(tokenizer: Tokenizer, asked: BackendRequest, draw: Callable[[list[int]], int]) -> RequestOutput:
    """All that comes of a request whose tokens `draw` chooses among those that are left."""
    masks = GrammarMasks(tokenizer, tokenizer.vocab_size)
    answer, output = RequestState(tokenizer, asked), RequestOutput(request_id="r")
    answer.mask = mask = masks.begin(asked).result(PATIENCE_S)
    barred: tuple[int, ...] = ()
    while output.finish is None:
        bits = mask.bitmask()
        left = [each for each in range(tokenizer.vocab_size) if bits[each // 8] >> each % 8 & 1 and each not in barred]
        barred = ()
        if left:
            mask.accept(token_id := draw(left))
            finish = "stop" if mask.is_complete else None
            answer.take(TokenEvent(request_id="r", token_id=token_id, finish=finish), output)
        else:
            answer.take(TokenEvent(request_id="r", finish="error", message="nothing is left"), output)
        if answer.rewinding:
            again = answer.rewound()
            mask.restart(again.generated)
            barred = again.banned_next
    return output


@settings(deadline=None)
@given(
    choices=st.lists(st.text("abß", min_size=1, max_size=5), min_size=1, max_size=6),
    banned=st.lists(st.text("abAS", min_size=1, max_size=3), min_size=1, max_size=3),
    kind=st.sampled_from(["choice", "regex"]),
    data=st.data(),
)
def test_an_answer_within_a_grammar_has_no_banned_string_and_fails_only_where_it_must(
    tokenizer: Tokenizer, choices: list[str], banned: list[str], kind: Literal["choice", "regex"], data: st.DataObject
) -> None:
    source = json.dumps(choices) if kind == "choice" else "|".join(choices)
    grammar = Grammar(kind=kind, source=source, param="guided")
    asked = BackendRequest(
        id="r",
        prompt_ids=[1],
        params=SamplingParams(grammar=grammar, banned_strings=tuple(banned), max_tokens=99),
        end_token_ids=(EOS_ID,),
    )
    possible = {text for text in choices if not any(each.casefold() in text.casefold() for each in banned)}
    try:
        output = to_its_end(tokenizer, asked, lambda left: data.draw(st.sampled_from(left)))
    except InvalidRequest as error:
        assert not possible
        assert "guided" in error.message
        return
    if output.error is None:
        assert output.text in possible
        assert output.token_ids == [*output.text.encode(), *([EOS_ID] if output.token_ids[-1] == EOS_ID else [])]
    else:
        assert output.error.message.startswith("banned_strings and guided allow no token")
        assert kind == "regex"
        assert output.text not in possible
