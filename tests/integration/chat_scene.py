"""What the chat page's pictures show, and how they are made:

.venv/bin/python -m tests.integration.chat_scene docs/chat-page.png
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from engine.config import ModelSpec
from tests.api.harness import serving
from tests.fakes.backend import FakeBackend
from tests.fakes.model import write_fake_model
from tests.fakes.saying import Script
from tests.integration.browser import Page, browser, browsing

MERGE = """\
Sort by start, then grow the last interval while the next one touches it:

```python
def merge(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    \"\"\"Overlapping intervals made one.

    >>> merge([(8, 9), (1, 3), (2, 5)])
    [(1, 5), (8, 9)]
    \"\"\"
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))  # they touch
        else:
            merged.append((start, end))
    return merged
```

Sorting dominates:

| step | time | space |
|---|---|---|
| sort | O(*n* log *n*) | O(*n*) |
| sweep | O(*n*) | O(1) beyond the answer |

**Touching counts as overlapping** here: `(1, 3)` and `(3, 4)` become `(1, 4)`. Write `<` where it should not.
"""
ASKED = "Merge overlapping intervals in Python, please. How fast is it?"
OTHERS = ("Name a small river in the Alps", "Explain paged attention to a student", "Rewrite this paragraph, kinder")


async def said(page: Page, question: str) -> None:
    """Ask, and wait for the whole answer."""
    await page.click("#message")
    await page.type(question)
    await page.press("Enter")
    await page.until("!document.querySelector('[aria-busy]') && !!document.querySelector('.turn:last-child footer')")


async def scene(page: Page, url: str) -> None:
    """A few conversations, the last of them open."""
    await page.go(f"{url}/chat")
    for question in OTHERS:
        await said(page, question)
        await page.run("document.getElementById('new').click()")
    await said(page, ASKED)


async def _pictures(target: Path, views: list[tuple[str, int, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as name, browser(Path(name)) as chrome:
        folder = Path(name)
        spec = ModelSpec(path=write_fake_model(folder / "model"), name="qwen3-8b-exl2")
        backend = FakeBackend(reply=Script({ASKED: MERGE}))
        async with serving(folder / "model", backend, spec=spec) as api, browsing(chrome) as page:
            await page.look(1280, 800, dark=True)
            await scene(page, api.url)
            for suffix, width, height, dark in views:
                await page.look(width, height, dark=dark)
                await page.run("document.getElementById('scroller').scrollTop = 0; document.activeElement.blur()")
                file = target.with_name(f"{target.stem}{suffix}{target.suffix}")
                await asyncio.to_thread(file.write_bytes, await page.picture())


if __name__ == "__main__":
    asyncio.run(_pictures(Path(sys.argv[1]), [("", 1280, 800, True)]))
