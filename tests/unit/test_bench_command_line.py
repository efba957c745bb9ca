"""What a bench is asked for: its flags and those for loading, in any order; what is refused by name."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import pytest

from console.bench.kinds import PLANS
from console.bench.kinds.latency import Latency
from console.bench.kinds.serve import Serve
from console.cli.bench_measure import LOADING, BenchArguments, parse_arguments
from console.cli.main import main
from console.settings.schema import flag_of


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("ERICLLM_CONFIG", raising=False)


def asked(*argv: str, bench: str = "latency") -> BenchArguments:
    return parse_arguments(argv, argparse.ArgumentParser(prog="ericllm bench", allow_abbrev=False), PLANS[bench])


def refused(capsys: pytest.CaptureFixture[str], *argv: str, bench: str = "latency") -> str:
    with pytest.raises(SystemExit):
        asked(*argv, bench=bench)
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("model", [("demo",), ("--model", "demo"), ("--model=demo",)])
@pytest.mark.parametrize(
    "flags", [("--cache-bits", "8"), ("--num-workers", "2"), ("--dtype", "float32"), ("--deterministic",)]
)
def test_flags_for_loading_stand_before_or_behind_the_model_and_the_benchs_own(
    model: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    name = flags[0].removeprefix("--").replace("-", "_")
    for order in itertools.permutations((model, flags, ("--prompts", "3"), ("--quick",))):
        found = asked(*itertools.chain(*order))
        settings = found.sources.settings()
        assert (found.model, settings.model) == ("demo", "demo")
        assert str(getattr(settings, name)) == (flags[1] if len(flags) > 1 else "True")
        assert found.plan == Latency(**{**Latency.quick, "prompts": 3})


def test_several_flags_with_values_before_the_model_leave_it_the_model() -> None:
    found = asked("--num-workers", "2", "--cache-bits", "8", "--max-model-len", "512", "demo", "--json", "r.json")
    settings = found.sources.settings()
    assert (settings.num_workers, settings.cache_bits, settings.max_model_len) == (2, 8, 512)
    assert (settings.model, found.files) == ("demo", {"json": Path("r.json")})


@pytest.mark.parametrize("name", PLANS)
def test_every_bench_takes_the_flags_for_loading_but_those_that_are_its_own(name: str) -> None:
    found = asked("--threads", "3", "demo", bench=name)
    assert found.sources.settings().threads == 3
    own = set(PLANS[name].__struct_fields__) & LOADING
    assert own == ({"max_prompts"} if name == "grid" else set())


def test_a_benchs_own_flag_is_no_setting_of_the_model_it_measures() -> None:
    found = asked("--max-prompts", "2,4", "demo", bench="grid")
    assert "max_prompts" not in found.sources.flags and found.plan.settings()["max_prompts"] == [2, 4]


@pytest.mark.parametrize("bench", PLANS)
@pytest.mark.parametrize(
    "flag", ["--port", "--api-key", "--slo-ttft", "--slo-itl", "--timeout", "--theme", "--max-queue"]
)
def test_a_flag_that_is_not_about_loading_is_refused_by_its_name(
    flag: str, bench: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = "latency" if (flag, bench) in (("--slo-ttft", "serve"), ("--slo-itl", "serve")) else bench
    for argv in ((flag, "1", "demo"), ("demo", flag, "1"), (f"{flag}=1", "demo"), ("--model", "demo", flag, "1")):
        said = refused(capsys, *argv, bench=bench)
        assert f"{flag} is not a load option and is not accepted by 'bench {bench}'" in said


def test_what_is_refused_does_not_show_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert "secret" not in refused(capsys, "demo", "--api-key=secret")


def test_serve_judges_the_time_between_tokens_under_both_of_its_names() -> None:
    plans = [asked("demo", flag, "50ms", bench="serve").plan for flag in ("--slo-itl", "--slo-tpot")]
    assert plans == [Serve(slo_tpot=0.05)] * 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--promts", "3", "demo"), "there is no --promts; did you mean --prompts?"),
        (("--cash-bits", "8", "demo"), "there is no --cash-bits; did you mean --cache-bits?"),
        (("demo", "--num-worker=2"), "there is no --num-worker; did you mean --num-workers?"),
        (("demo", "other"), "unexpected argument other: only one model"),
        (("demo", "--model", "other"), "the model is given twice: demo and other"),
        (("--url", "http://here", "--cache-bits", "8"), "--cache-bits is a load option"),
    ],
)
def test_what_cannot_be_understood_is_one_sentence(
    argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *argv)


@pytest.mark.parametrize(
    "arguments", [[], ["sideways"], ["--json", "latency"], ["overhead"], ["latency", "--prompts", "0"]]
)
def test_what_is_no_bench_is_refused_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    assert len(printed.err.strip().splitlines()) == 1


def test_only_settings_of_model_and_engine_are_for_loading() -> None:
    assert {flag_of(name).group for name in LOADING} == {"Model", "Engine"}
