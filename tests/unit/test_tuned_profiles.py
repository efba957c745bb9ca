"""What autotune found: kept by model and hardware, used after all that somebody set and before the defaults."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from console.cli.main import main
from console.link.tuning import Tried
from console.settings.rows import setting_rows
from console.settings.schema import Settings
from console.settings.sources import Sources
from console.tuning.autotune.space import Setting
from console.tuning.profiles import (
    TunedProfile,
    TunedProfiles,
    hardware_of,
    settings_for,
    settings_of,
    tuned_for,
    usable,
    with_tuned,
)
from engine.devices import new_probe
from engine.models.resolve import resolve_local
from engine.snapshot import DeviceReading

SETTINGS = {"num_workers": 2, "max_prompts": 24, "cache_bits": 8}


def found(model: str = "m", hardware: str = "h", *, applied: bool = True, settings: object = None) -> TunedProfile:
    measured = Tried(
        setting=Setting(workers=2),
        tokens_per_s=100.0,
        low=95.0,
        high=105.0,
        ttft_s=0.1,
        itl_s=0.02,
        goodput_per_s=1.0,
        verdict="kept",
        windows=3,
    )
    chosen = dict(SETTINGS if settings is None else settings)  # type: ignore[call-overload]
    return TunedProfile(model=model, hardware=hardware, at=1.0, applied=applied, settings=chosen, measured=measured)


def of_demo(folder: Path, **more: object) -> None:
    """Something was found for the demo on this machine."""
    key = str(resolve_local("demo", ()))
    TunedProfiles(folder).keep(found(key, hardware_of(new_probe(()).read()), **more))  # type: ignore[arg-type]


def newest(profiles: TunedProfiles, model: str, hardware: str) -> TunedProfile | None:
    """The last result in the file for a model on such hardware."""
    if profiles.file is None or not profiles.file.exists():
        return None
    entries = msgspec.convert(msgspec.json.decode(profiles.file.read_bytes())["entries"], list[TunedProfile])
    return next((each for each in reversed(entries) if (each.model, each.hardware) == (model, hardware)), None)


def test_what_was_found_is_kept_by_model_and_hardware(tmp_path: Path) -> None:
    kept = TunedProfiles(tmp_path)
    kept.keep(found("a"))
    kept.keep(found("a", "other"))
    kept.keep(found("a", settings={"num_workers": 3}))
    assert newest(kept, "a", "h") == found("a", settings={"num_workers": 3})
    assert newest(kept, "a", "other") == found("a", "other")
    assert newest(kept, "b", "h") is None


def test_what_is_applied_stays_in_use_beside_what_is_found_after_it(tmp_path: Path) -> None:
    kept = TunedProfiles(tmp_path)
    kept.keep(found("a", settings={"num_workers": 3}))
    for workers in (4, 5):
        kept.keep(found("a", applied=False, settings={"num_workers": workers}))
    assert newest(kept, "a", "h") == found("a", applied=False, settings={"num_workers": 5})
    assert kept.applied("a", "h") == found("a", settings={"num_workers": 3})
    kept.keep(found("a", settings={"num_workers": 6}))
    assert newest(kept, "a", "h") == kept.applied("a", "h") == found("a", settings={"num_workers": 6})
    assert kept.file is not None and kept.file.read_text().count('"model"') == 1


def test_a_run_that_applies_nothing_leaves_what_is_in_use_in_use(tmp_path: Path) -> None:
    of_demo(tmp_path)
    of_demo(tmp_path, applied=False, settings={"num_workers": 4})
    assert tuned_for(Settings(), "demo", tmp_path) == SETTINGS


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(OSError, match="folder"):
        TunedProfiles(tmp_path / "folder").keep(found("a"))


def test_a_file_that_cannot_be_read_is_begun_anew(tmp_path: Path) -> None:
    kept = TunedProfiles(tmp_path)
    assert kept.file is not None
    kept.file.write_text("nonsense")
    assert kept.applied("a", "h") is None
    kept.keep(found("a"))
    assert newest(kept, "a", "h") == found("a")


def test_without_a_folder_nothing_is_kept() -> None:
    kept = TunedProfiles(None)
    kept.keep(found("a"))
    assert newest(kept, "a", "h") is None


def test_it_is_used_where_it_was_applied_and_only_then(tmp_path: Path) -> None:
    settings = Settings()
    assert tuned_for(settings, "demo", tmp_path) == {}
    of_demo(tmp_path, applied=False)
    assert tuned_for(settings, "demo", tmp_path) == {}
    of_demo(tmp_path)
    assert tuned_for(settings, "demo", tmp_path) == SETTINGS


def test_other_hardware_has_its_own(tmp_path: Path) -> None:
    of_demo(tmp_path)
    assert tuned_for(Settings(devices="sim:24"), "demo", tmp_path) == {}


def test_it_comes_after_flags_variables_and_the_file_and_before_defaults(tmp_path: Path) -> None:
    of_demo(tmp_path, settings={"num_workers": 2, "max_prompts": 24, "step_tokens": 128, "threads": 3})
    given = Sources(
        flags={"num_workers": 4}, variables={"max_prompts": 5}, saved={"step_tokens": 64}, file=tmp_path / "c"
    )
    sources = with_tuned(given, given.settings(), tmp_path)
    settings = sources.settings()
    assert (settings.num_workers, settings.max_prompts, settings.step_tokens, settings.threads) == (4, 5, 64, 3)
    assert sources.origin("threads").source == "tuned"
    assert sources.origin("num_workers").source == "flag"


def test_settings_say_that_autotune_set_them_and_where_that_stands(tmp_path: Path) -> None:
    of_demo(tmp_path)
    sources = with_tuned(Sources(file=tmp_path / "c"), Settings(), tmp_path)
    settings = sources.settings()
    row = next(row for row in setting_rows(settings, settings, sources, {}) if row.name == "max_prompts")
    assert (row.value, row.source, row.where) == ("24", "tuned", str(tmp_path / "tuned.json"))


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ((), {"cache_bits", "ngram_draft", "draft_tokens", "step_tokens"}),
        (("cache_8bit",), {"ngram_draft", "draft_tokens", "step_tokens"}),
        (("draft_model",), {"cache_bits", "step_tokens"}),
        (("ngram_draft",), {"cache_bits", "step_tokens"}),
        (("backend",), {"cache_bits", "ngram_draft", "draft_tokens"}),
    ],
)
def test_of_settings_that_go_together_none_is_used_where_one_is_set(given: tuple[str, ...], left: set[str]) -> None:
    tuned = {"cache_bits": 8, "ngram_draft": True, "draft_tokens": 4, "step_tokens": 64}
    assert usable(tuned, given).keys() == left


def test_what_is_no_setting_to_be_tuned_is_never_taken_from_the_file() -> None:
    assert usable({"host": 1, "threads": 2}, ()) == {"threads": 2}


def test_another_model_gets_nothing_of_what_was_found_for_the_first(tmp_path: Path) -> None:
    of_demo(tmp_path)
    sources = with_tuned(Sources(file=tmp_path / "c"), Settings(), tmp_path)
    running = sources.settings()
    assert running.cache_bits == 8
    other, own = settings_for(sources, running, tmp_path, "/models/other")
    assert (other.cache_bits, own) == (16, frozenset())
    again, own = settings_for(sources, running, tmp_path, "demo")
    assert (again.cache_bits, own) == (8, frozenset(SETTINGS))


def test_what_was_set_while_the_program_ran_stays(tmp_path: Path) -> None:
    of_demo(tmp_path)
    sources = with_tuned(Sources(file=tmp_path / "c"), Settings(), tmp_path)
    turned = sources.settings().model_copy(update={"cache_bits": 4})
    assert settings_for(sources, turned, tmp_path, "/models/other")[0].cache_bits == 4


def test_hardware_goes_by_its_devices_and_a_cpu_by_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("console.tuning.profiles.usable_cores", lambda: 8)
    cpu = DeviceReading(id="cpu", name="AMD EPYC 7763", kind="cpu", utilisation=0.0, total_bytes=1)
    gpu = DeviceReading(id="cuda:0", name="NVIDIA GeForce RTX 3090", kind="cuda", utilisation=0.0, total_bytes=1)
    assert hardware_of([cpu]) == "AMD EPYC 7763, 8 cores"
    assert hardware_of([cpu, gpu, gpu]) == "2 x NVIDIA GeForce RTX 3090"


def test_a_setting_becomes_settings_as_far_as_its_knobs_were_turned() -> None:
    setting = Setting(workers=2, max_prompts=8, draft_tokens=4, cache_bits=8)
    assert settings_of(setting, ("workers", "draft_tokens")) == {
        "num_workers": 2,
        "ngram_draft": True,
        "draft_tokens": 4,
    }
    none = msgspec.structs.replace(setting, draft_tokens=0)
    assert settings_of(none, ("draft_tokens",)) == {"ngram_draft": False, "draft_tokens": None}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--minutes", "0"], "0 is not a number from 0.05 to 1440"),
        (["--percentile", "100"], "100 is not a number from 1 to 99.9"),
        (["--users", "none"], "none is not a number from 1 to 10,000"),
        (["--knobs", "workers,gears"], "unknown knob gears; valid: workers, max_prompts"),
        (["--least-cache-bits", "3"], "invalid choice: 3"),
    ],
)
def test_a_bad_flag_of_autotune_ends_it_with_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["autotune", "demo", *arguments])
    told = capsys.readouterr().err
    assert said in told and len(told.splitlines()) == 1


def test_a_bad_length_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autotune", "demo", "--prompt", "long"]) == 2
    assert "long is not a length" in capsys.readouterr().err
