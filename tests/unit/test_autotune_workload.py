"""Lengths of requests while settings are tried; which knobs there are."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from console.bench.workload import Exchange, Prompt, Words
from console.link.tuning import TuneOrder
from console.tuning.autotune.knob_space import space_of
from console.tuning.autotune.rig import setting_of
from console.tuning.autotune.space import KnobName, Setting
from console.tuning.autotune.traffic import DRAWN, asked_mix, mix_of_history, mix_of_trace, usual_mix
from engine.backends.base import LoadedModel
from engine.config import EngineConfig, ModelSpec
from engine.errors import InvalidRequest
from engine.models.resolve import resolve_local
from engine.snapshot import Insight, Lengths, Spread


class Letters(Words):
    """A token for each word."""

    def count(self, text: str) -> int:
        return len(text.split())


def history(count: int) -> Insight:
    prompts = Lengths(spread=Spread(count=count, longest=900), bounds=(64, 256), counts=(0, count, 0))
    outputs = Lengths(spread=Spread(count=count, longest=40), bounds=(16, 64), counts=(0, 0, count))
    return Insight(prompts=prompts, outputs=outputs)


def test_lengths_are_as_they_were_written() -> None:
    mix = asked_mix("128", "8-16", seed=1)
    assert mix is not None
    assert {prompt for prompt, _ in mix.lengths} == {128}
    assert {output for _, output in mix.lengths} == set(range(8, 17))
    assert mix.source == "prompts of 128 tokens, answers of 8-16"


@pytest.mark.parametrize("text", ["0", "8-4", "x", "", "-3", "1-", "9999999", "trace"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"length|below"):
        asked_mix(text, None, seed=1)


def test_lengths_of_a_trace_are_those_of_its_questions_and_answers() -> None:
    trace = [Exchange("one two three four", "a b c d e"), Exchange("too short", "no"), Exchange("w " * 90, "x " * 90)]
    mix = mix_of_trace(trace, Letters(), 100, seed=1)
    assert set(mix.lengths) == {(4, 5)}
    assert mix.source == "questions and lengths of answers as in a trace of 3 exchanges"
    with pytest.raises(InvalidRequest, match="no exchange of the trace fits"):
        mix_of_trace(trace[1:], Letters(), 100, seed=1)


class Numbers(Letters):
    """A token for each word, whose id is the number that it is."""

    def of_text(self, text: str) -> Prompt:
        ids = tuple(map(int, text.split()))
        return Prompt(len(ids), ids=ids)


def test_a_trace_brings_what_its_questions_say_in_the_order_of_their_lengths() -> None:
    trace = [Exchange(" ".join(map(str, range(count))), "a " * (count + 1)) for count in (6, 9, 12)]
    mix = mix_of_trace(trace, Numbers(), 100, seed=1)
    for number in range(len(mix.lengths)):
        prompt, output = mix.of(number)
        assert mix.prompt_ids(number) == tuple(range(prompt)) and output == prompt + 1
    short = mix.within(12)
    assert {len(short.prompt_ids(number) or ()) for number in range(20)} == {6, 9}
    assert mix_of_trace(trace, Letters(), 100, seed=1).prompt_ids(0) is None


def test_without_lengths_of_an_operators_own_none_is_made_up_for_them() -> None:
    assert asked_mix(None, None, seed=1) is None


def test_lengths_come_from_the_columns_of_the_history() -> None:
    mix = mix_of_history(history(100), seed=1)
    assert mix is not None and len(mix.lengths) == DRAWN
    assert all(65 <= prompt <= 256 for prompt, _ in mix.lengths)
    assert all(output >= 65 for _, output in mix.lengths)
    assert "last 100 requests" in mix.source


def test_too_short_a_history_says_nothing() -> None:
    assert mix_of_history(history(49), seed=1) is None
    assert mix_of_history(Insight(), seed=1) is None


def test_every_request_fits_the_context() -> None:
    mix = usual_mix(seed=1).within(100)
    assert all(prompt <= 75 and prompt + output < 100 and output >= 1 for prompt, output in mix.lengths)


def test_the_same_seed_draws_the_same_lengths() -> None:
    assert usual_mix(3) == usual_mix(3) != usual_mix(4)


# -- knobs ------------------------------------------------------------------------------------------------------------


def demo() -> ModelSpec:
    path = resolve_local("demo", ())
    assert path is not None
    return ModelSpec(path=path, name="demo")


def loaded(backend: str = "torch", device: str = "cpu") -> LoadedModel:
    return LoadedModel(
        backend=backend,
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        devices=(device,),
        vocab_size=4096,
        max_model_len=1024,
        kv_tokens=16384,
        page_tokens=16,
        weights_bytes=1,
        kv_bytes=1,
        parameters=1,
    )


def knobs_of(
    model: LoadedModel, *, cores: int = 2, spec: ModelSpec | None = None, order: TuneOrder | None = None
) -> dict[str, tuple[int, ...]]:
    space = space_of(model, spec or demo(), Setting(), cores=cores, load_s=None, order=order or TuneOrder())
    return {knob.name: knob.values for knob in space.knobs}


def test_two_cores_have_no_threads_to_try_and_no_more_workers_than_cores() -> None:
    found = knobs_of(loaded())
    assert found["workers"] == (1, 2)
    assert "threads" not in found


def test_on_many_cores_threads_are_tried_from_those_in_use() -> None:
    space = space_of(loaded(), demo(), Setting(), cores=6, load_s=None, order=TuneOrder())
    assert space.start.threads == 6
    assert next(knob for knob in space.knobs if knob.name == "threads").values == (1, 2, 4, 6)


def test_a_gpu_has_no_threads_and_the_library_cuts_prompts_itself() -> None:
    found = knobs_of(loaded("exllamav2", "cuda:0"), cores=16)
    assert not {"threads", "step_tokens"} & found.keys()
    assert found["cache_bits"] == (8, 16)


def test_fewer_cache_bits_are_tried_where_they_are_asked_for() -> None:
    assert knobs_of(loaded(), order=TuneOrder(least_cache_bits=4))["cache_bits"] == (4, 8, 16)


def test_a_draft_model_leaves_no_other_guesses_to_be_tried() -> None:
    spec = msgspec.structs.replace(demo(), draft_model=Path("/models/draft"))
    assert "draft_tokens" not in knobs_of(loaded("exllamav2", "cuda:0"), spec=spec)


def test_only_knobs_that_are_wished_for_are_turned() -> None:
    assert set(knobs_of(loaded(), order=TuneOrder(knobs=("max_prompts",)))) == {"max_prompts"}


@pytest.mark.parametrize(
    ("knob", "model", "cores", "sentence"),
    [
        ("threads", loaded(), 2, "threads cannot be tuned here: 2 cores are too few to share"),
        ("threads", loaded(device="cuda:0"), 16, "threads cannot be tuned here: the model runs on a GPU"),
        (
            "step_tokens",
            loaded("exllamav2", "cuda:0"),
            16,
            "step_tokens cannot be tuned here: exllamav2 has no step-token limit",
        ),
        ("workers", loaded(), 1, "workers cannot be tuned here: it has only one value"),
    ],
)
def test_a_knob_that_was_asked_for_and_cannot_be_turned_is_refused_by_its_name(
    knob: KnobName, model: LoadedModel, cores: int, sentence: str
) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        knobs_of(model, cores=cores, order=TuneOrder(knobs=("max_prompts", knob)))


def test_guesses_beside_a_draft_model_are_refused_by_name() -> None:
    spec = msgspec.structs.replace(demo(), draft_model=Path("/models/draft"))
    with pytest.raises(InvalidRequest, match="demo already uses a draft model"):
        knobs_of(loaded("exllamav2", "cuda:0"), spec=spec, order=TuneOrder(knobs=("draft_tokens",)))


def test_where_nothing_can_be_turned_one_sentence_says_so() -> None:
    spec = msgspec.structs.replace(demo(), draft_model=Path("/models/draft"))
    order = TuneOrder(fixed=("max_prompts",), least_cache_bits=16)
    with pytest.raises(InvalidRequest, match="nothing to tune"):
        space_of(loaded("exllamav2"), spec, Setting(), cores=1, load_s=None, order=order)


def test_fewer_bits_are_tried_where_the_library_can_keep_such_heads_alone(tmp_path: Path) -> None:
    for head_dim, bits in ((96, (8, 16)), (80, None)):
        sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim, "num_hidden_layers": 2}
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OrionForCausalLM"], **sizes}))
        spec = ModelSpec(path=tmp_path, name="m")
        assert knobs_of(loaded("exllamav2", "cuda:0"), spec=spec).get("cache_bits") == bits


def test_cores_are_shared_out_evenly_where_threads_are_not_to_be_turned() -> None:
    order = TuneOrder(knobs=("workers",))
    assert space_of(loaded(), demo(), Setting(), cores=6, load_s=None, order=order).start.threads == 0


def test_the_setting_in_use_is_read_off_the_model_and_its_knobs() -> None:
    spec = msgspec.structs.replace(demo(), cache_bits=8, ngram_draft=True, draft_tokens=4)
    config = EngineConfig(num_workers=2, max_prompts=5, step_tokens=256, threads=3)
    assert setting_of(spec, config) == Setting(
        workers=2, max_prompts=5, step_tokens=256, threads=3, cache_bits=8, draft_tokens=4
    )
