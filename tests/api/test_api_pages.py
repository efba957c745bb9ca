"""GET /chat and /docs as they are served; what they do in a browser is in tests/integration/chat_page."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from console.api.pages.pages import FOLDER, PAGES
from console.api.settings import ApiSettings
from tests.api.harness import Served, serving

FILES = sorted(f"{page}/{path.name}" for page in PAGES for path in (FOLDER / page).iterdir())


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Served]:
    """A server that asks for a key."""
    async with serving(tmp_path, settings=ApiSettings(port=0, api_key="eric_key")) as served:
        yield served


@pytest.mark.parametrize("path", ["/chat", "/docs", *(f"/{file}" for file in FILES)])
async def test_a_page_and_its_files_need_no_key_and_may_do_next_to_nothing(guarded: Served, path: str) -> None:
    async with guarded.http.get(path) as response:
        assert response.status == 200
        policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert response.content_type != "application/octet-stream"
        again = {"If-None-Match": response.headers["ETag"]}
    async with guarded.http.get(path, headers=again) as response:
        assert (response.status, await response.read()) == (304, b"")


async def test_openapi_json_needs_no_key_but_the_api_does(guarded: Served) -> None:
    await guarded.get("/openapi.json")
    await guarded.get("/v1/models", status=401)


@pytest.mark.parametrize("name", ["nothing.js", "..%2fpages.py", "%2e%2e%2fpages.py", "chat.html%00.js", "docs.js", ""])
async def test_only_the_page_s_own_files_are_given(guarded: Served, name: str) -> None:
    async with guarded.http.get(f"/chat/{name}") as response:
        assert response.status in (400, 404)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_asks_for_nothing_from_elsewhere_and_has_no_script_of_its_own_in_it(page: str) -> None:
    html = (FOLDER / page / f"{page}.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|javascript:", html) == []
    addresses = re.findall(r'(?:src|href)="([^"#]+)"', html)
    assert addresses and not [address for address in addresses if ":" in address or address.startswith("/")]


def test_no_script_makes_markup_of_text() -> None:
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|setHTML"
    for path in FOLDER.glob("*/*.js"):
        assert re.findall(makers, path.read_text()) == [], path
