"""Every call that we make into exllamav2, against the source of the package itself; none of it is imported.

Our side is read from our sources: what enters as `Any` has a row in `library_table`, and whatever is asked of it is
found from there. The library's side is read from the wheel. So a new call of ours, a renamed argument of theirs, or a
row that nothing uses any more fails here.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.backends import base
from engine.backends.common import exllamav2_checkpoint
from engine.backends.exllamav2 import attention, library_types, sampling
from engine.backends.exllamav2 import sampling as draws
from engine.config import SamplingParams, model
from engine.config import sampling as asked
from engine.models import headers
from tests.contract.library_calls import read_sources
from tests.contract.library_kinds import Findings, Use
from tests.contract.library_source import Package
from tests.contract.library_table import (
    DICTS,
    EVERYBODYS,
    FAKES,
    GENERATOR,
    GPU_ROWS,
    JOB,
    ROOTS,
    SETTINGS,
    STARRED,
    TYPES,
)
from tests.fakes.exllamav2_wheel import wheel_folder

_OURS = Path(library_types.__file__).parent
_CONTRACTS = [Path(str(module.__file__)) for module in (model, asked, base, headers)]
_FAKES = Path(__file__).parents[1] / "fakes"
_GPU = Path(__file__).parents[1] / "gpu"
_PAGED_CALLS = 2


@pytest.fixture(scope="module")
def library() -> Package:
    return Package(wheel_folder() / "exllamav2")


@pytest.fixture(scope="module")
def ours(library: Package) -> Findings:
    return _read(sorted(_OURS.glob("*.py")), library)


def _read(files: list[Path], library: Package, more: Mapping[str, str] | None = None) -> Findings:
    """more: further rows of either table."""
    return read_sources(
        files,
        library="exllamav2",
        roots=ROOTS | dict(more or {}),
        types=TYPES | dict(more or {}),
        homes=library.class_homes,
        contracts=_CONTRACTS,
    )


def _strays(found: Findings, library: Package) -> dict[str, set[str]]:
    """Attributes that some class of the library has, asked of something that nothing is known of."""
    classes = {use.owner for use in found.uses if ":" in use.owner}
    theirs = {name for each in classes for name in library.klass(each).attributes if not name.startswith("__")}
    return {name: places for name, places in found.unknown.items() if name in theirs - EVERYBODYS}


def _problem(use: Use, library: Package) -> str:
    """Why the library does not have what is used, "" where it does."""
    try:
        if use.owner in DICTS:
            return "" if use.name in library.strings(DICTS[use.owner]) else "is no key of it"
        if use.owner.startswith("module "):
            module = use.owner.removeprefix("module ")
            if use.name not in library.module_names(module):
                return "is not in the module"
            return library.function(module, use.name).problem(*use.call) if use.call else ""
        found = library.klass(use.owner)
        if use.name != "__init__" and use.name not in found.attributes:
            return "is no attribute of it"
        if use.call is None or (use.starred and use.owner in STARRED):
            return ""
        if use.starred:
            return "gets arguments that are not written out"
        return found.methods[use.name].problem(*use.call) if use.name in found.methods else "is no method"
    except (LookupError, FileNotFoundError) as error:
        return str(error)


def test_everything_that_we_ask_of_the_library_is_there(ours: Findings, library: Package) -> None:
    problems = [
        f"{use.where}: {use.owner} {use.name} {problem}" for use in ours.uses if (problem := _problem(use, library))
    ]
    assert sorted(problems) == []
    assert len(ours.uses) > 100, "our sources were hardly read"


def test_what_the_gpu_checks_ask_of_the_library_is_there_too(library: Package) -> None:
    files = [_OURS / "library_types.py", *(_GPU / f"{name}.py" for name in ("library", "direct", "check_weights"))]
    found = _read(files, library, GPU_ROWS)
    assert sorted(found.unexplained) == []
    assert sorted(problem for use in found.uses if (problem := _problem(use, library))) == []
    assert {"get_weight_tensor_dq", "iterate", "greedy"} <= {use.name for use in found.uses}
    assert _strays(found, library) == {}


def test_nothing_of_the_library_is_used_that_the_tables_do_not_explain(ours: Findings) -> None:
    assert sorted(ours.unexplained) == []


def test_nothing_that_the_library_has_is_asked_of_something_unknown(ours: Findings, library: Package) -> None:
    assert _strays(ours, library) == {}


def test_the_tables_say_nothing_that_is_not_used(ours: Findings) -> None:
    assert sorted(ROOTS.keys() - ours.roots) == []
    assert sorted(TYPES.keys() - ours.types) == []


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("config.max_sequence_length", "is no attribute"),
        ("config.prepare(no_tensor=True)", "takes no argument no_tensor"),
        ("library.generator(model=1, cache=2, tokenizer=3, max_chunks=4)", "takes no argument max_chunks"),
        ("library.generator(model=1, cache=2)", "needs tokenizer"),
        ("library.job(1, 2, **config)", "not written out"),
        ("[result['tokens'] for result in make().iterate()]", "is no key"),
        ("make().iterate(1)", "takes 0 positional"),
        ("setattr(config, 'max_length', 1)", "is no attribute"),
    ],
)
def test_a_call_that_the_library_does_not_have_is_found(
    line: str, finding: str, library: Package, tmp_path: Path
) -> None:
    source = f"def use(library: Library, config: Any, make: Callable[[], Any]) -> None:\n    {line}\n"
    (tmp_path / "backend.py").write_text(source)
    files = [_OURS / "library_types.py", tmp_path / "backend.py"]
    found = _read(files, library, {"backend: use(make)": GENERATOR})
    problems = [_problem(use, library) for use in found.uses if use.where.startswith("backend")]
    assert any(finding in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("thing.anything", "use(thing) is Any"),
        ("config.arch.unheard_of.more", "goes on from ExLlamaV2ArchParams.unheard_of"),
        ("getattr(config, name)", "reads a name that is not written out"),
    ],
)
def test_a_use_that_no_table_explains_is_found(line: str, finding: str, library: Package, tmp_path: Path) -> None:
    (tmp_path / "backend.py").write_text(f"def use(thing: Any, config: Any, name: str) -> None:\n    {line}\n")
    assert any(finding in said for said in _read([tmp_path / "backend.py"], library).unexplained)


def test_a_use_of_something_unknown_is_found(library: Package, tmp_path: Path) -> None:
    (tmp_path / "backend.py").write_text(
        "def use(generator: Any, it: object) -> None:\n    generator.iterate()\n    it.thing.num_remaining_jobs()\n"
    )
    assert _strays(_read([tmp_path / "backend.py"], library), library) == {"num_remaining_jobs": {"backend.py:3"}}


def test_every_field_of_the_samplers_settings_is_set_for_every_request(library: Package) -> None:
    fields = set(library.klass(SETTINGS).methods["__init__"].positional)
    for params in (SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(mirostat=2, cfg_scale=1.5)):
        assert set(sampling.settings_of(params, 320)) == fields


def test_the_architectures_that_we_accept_are_those_that_the_library_knows(library: Package) -> None:
    compared = {
        constant.value
        for node in ast.walk(library.tree("architecture"))
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "arch_string"
        for constant in ast.walk(node)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    }
    assert compared == exllamav2_checkpoint.ARCHITECTURES


def test_the_environment_variables_that_we_set_are_read_by_the_library(library: Package) -> None:
    said = {
        node.value
        for file in _OURS.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("EXLLAMA_")
    }
    assert said
    assert said <= library.strings()


def test_the_wheel_is_the_version_that_we_ask_for(library: Package) -> None:
    from engine.backends.exllamav2.errors import VERSION

    assert VERSION in library.strings("version")


@pytest.mark.parametrize("message", ["Insufficient VRAM", "Insufficient space in device allocation", "Could not find"])
def test_the_messages_that_we_tell_errors_by_are_the_librarys(message: str, library: Package) -> None:
    matched = (_OURS / "errors.py").read_text()
    assert message in matched
    assert any(message in said for said in library.strings())


def test_our_attention_takes_every_argument_that_the_library_gives(library: Package) -> None:
    """Also what it collects in `flash_kwargs`. Calls without a block table are of tensor parallelism, left to flash."""
    options = {
        str(node.slice.value)
        for node in ast.walk(library.tree("attn"))
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == "flash_kwargs"
        and isinstance(node.slice, ast.Constant)
    }
    assert options == {"window_size", "softcap"}
    paged = [
        {each.arg for each in call.keywords if each.arg}
        for call in library.calls_of("attn", "flash_attn_with_kvcache")
        if not call.args
    ]
    paged = [keywords for keywords in paged if "block_table" in keywords]
    assert len(paged) == _PAGED_CALLS
    for keywords in paged:
        given = dict.fromkeys([*keywords, *options])
        inspect.signature(attention.FlashAttention.paged_with_cache).bind(None, **given)
    for call in library.calls_of("attn", "flash_attn_func"):
        given = dict.fromkeys([*(each.arg for each in call.keywords if each.arg), *options])
        inspect.signature(attention.FlashAttention.dense).bind(None, *call.args, **given)


def test_our_random_numbers_have_every_method_that_the_library_calls(library: Package) -> None:
    called = {
        node.attr
        for node in ast.walk(library.tree("generator.dynamic"))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "rng"
    }
    assert called
    assert all(callable(getattr(draws.RandomDraws, name, None)) for name in called)


def test_what_stands_in_for_receive_logits_is_called_as_the_library_calls_it(library: Package) -> None:
    calls = [
        node
        for node in ast.walk(library.tree("generator.dynamic"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "receive_logits"
    ]
    assert calls
    assert all((len(call.args), call.keywords) == (1, []) for call in calls)
    assert library.klass(JOB).methods["receive_logits"].positional == ("logits",)


@pytest.mark.parametrize("fake", FAKES)
def test_a_fake_has_nothing_that_the_library_lacks(fake: str, library: Package) -> None:
    """The backend runs on the fakes in its own tests: with this, what works on them is there in the library."""
    theirs, own = FAKES[fake]
    pretended, real = Package(_FAKES).klass(fake), library.klass(theirs)
    public = {name for name in pretended.attributes if not name.startswith("_")}
    assert public - own <= real.attributes
    for name in public & pretended.methods.keys() - own:
        taken, given = pretended.methods[name], real.methods[name]
        assert taken.problem(len(given.required), ()) == "", name
        assert {*taken.positional, *taken.keyword_only} <= {*given.positional, *given.keyword_only}, name


def test_the_fake_settings_have_the_librarys_fields(library: Package) -> None:
    from tests.fakes.exllama_job import FakeSettings

    assert {field.name for field in dataclasses.fields(FakeSettings)} == set(
        library.klass(SETTINGS).methods["__init__"].positional
    )


def test_every_cache_is_made_as_the_plain_one_is(library: Package) -> None:
    plain = library.klass("cache:ExLlamaV2Cache").methods["__init__"]
    for bits in (8, 6, 4):
        assert library.klass(f"cache:ExLlamaV2Cache_Q{bits}").methods["__init__"] == plain
