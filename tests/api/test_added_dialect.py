"""A dialect is a package that nothing else names: the one of docs/extending.md, written to a folder, is served."""

from __future__ import annotations

import ast
import json
import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import console.api
from console.api import dialects
from console.api.dialects.registry import discover
from console.tui.screens.api.screen import curl_line
from tests.api.harness import Served, serving
from tools.docs_pages import parameters

API = Path(console.api.__file__).parent
WALK = Path(__file__).parents[2] / "docs" / "extending.md"


def source() -> str:
    """The package that docs/extending.md shows."""
    section = WALK.read_text().partition("\n## A dialect\n")[2].partition("\n## ")[0]
    return section.partition("```python\n")[2].partition("```")[0]


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package, where another program put it."""
    folder = tmp_path / "plugins" / "shout"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(source())
    monkeypatch.setattr(dialects, "__path__", [*dialects.__path__, str(folder.parent)])
    yield
    sys.modules.pop(f"{dialects.__name__}.shout", None)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with it."""
    async with serving(tmp_path) as served:
        yield served


async def refused(api: Served, status: int, **body: Any) -> str:
    """The sentence of a refusal, which is all that it says."""
    async with api.http.post("/shout", json=body) as response:
        assert response.status == status
        answer = await response.json()
        assert set(answer) == {"oops"}
        return str(answer["oops"])


async def test_it_is_answered_and_counted(api: Served) -> None:
    plain = await api.post("/v1/completions", prompt="x", max_tokens=4)
    assert await api.post("/shout", say="x", length=4) == {"text": plain["choices"][0]["text"].upper()}
    [reading] = [each for each in api.server.report().dialects if each.name == "shout"]
    assert (reading.title, reading.routes, reading.on, reading.requests) == ("Shouting", ("/shout",), True, 1)


async def test_it_refuses_what_it_does_not_take_in_its_own_shape_and_words(api: Served) -> None:
    assert await refused(api, 400, say="x", pitch=1) == "pitch is not a field of this endpoint"
    assert await refused(api, 400, say="x", volume=3) == "volume is not supported: all answers are equally loud"
    assert await refused(api, 400, say="x", length=0) == "length is 0; it must be at least 1"
    assert await refused(api, 400) == "say is missing"
    assert "no model 'max_tokens'" in await refused(api, 404, say="x", model="max_tokens")
    await api.post("/shout", say="x", volume=11, user="me", length=10**6)


async def test_it_stands_in_the_description_of_the_api(api: Served) -> None:
    document = await api.get("/openapi.json")
    operation = document["paths"]["/shout"]["post"]
    assert (operation["tags"], operation["summary"]) == (["Shouting"], "Continue a text, loudly")
    assert {"name": "Shouting"} in document["tags"]
    body = document["components"]["schemas"]["ShoutBody"]["properties"]
    assert body["say"]["description"] == "the text."
    assert body["volume"]["x-refused"] and body["volume"]["enum"] == [11, None, "", [], {}]
    error = operation["responses"]["default"]["content"]["application/json"]["schema"]
    assert error["additionalProperties"] == {"type": "string"}


def test_it_has_its_rows_in_the_page_of_parameters() -> None:
    section = parameters.page().partition("\n## Shouting\n")[2]
    assert "### `POST /shout`" in section
    assert "| `say` |  | string | required | the text. |" in section
    assert "| `volume` | `11` | all answers are equally loud |" in section
    assert "Inert: `user`." in section


async def test_its_example_is_a_line_for_a_shell_that_is_answered(api: Served) -> None:
    own = [each for each in api.server.report().dialects if each.name == "shout"]
    words = shlex.split(curl_line(api.url, "fake", dialects=own, with_key=False))
    assert words[:2] == ["curl", f"{api.url}/shout"]
    assert (await api.post("/shout", **json.loads(words[-1])))["text"]


async def test_it_is_a_404_that_says_so_once_it_is_switched_off(api: Served) -> None:
    await api.server.switch_dialect("shout", False)
    assert "the Shouting dialect is disabled" in await refused(api, 404, say="x")
    assert "/shout" not in (await api.get("/openapi.json"))["paths"]
    await api.server.switch_dialect("shout", True)
    await api.post("/shout", say="x")


def test_every_package_is_a_dialect_and_no_two_have_one_name(tmp_path: Path) -> None:
    packages = {path.parent.name for path in (API / "dialects").glob("*/__init__.py")}
    assert len(discover()) == len(packages) + 1
    again = tmp_path / "plugins" / "shout_again"
    again.mkdir()
    (again / "__init__.py").write_text(source())
    with pytest.raises(ValueError, match="called shout"):
        discover()
    sys.modules.pop(f"{dialects.__name__}.shout_again", None)


def test_nothing_of_the_api_outside_their_packages_names_a_dialect() -> None:
    names = {dialect.name for dialect in discover()}
    named = [
        f"{file.relative_to(API)}:{node.lineno}: {node.value}"
        for file in API.rglob("*.py")
        if API / "dialects" not in file.parents
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert named == []
