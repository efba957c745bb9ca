"""schemathesis over the server's own openapi.json: whatever is sent, no answer is a 5xx, and each is as it is told."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from tests.api.harness import serving
from tests.api.operators import FolderOperator
from tests.fakes.backend import FakeBackend, saying

FEWEST_CASES = 2000
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance,response_headers_conformance"
_PATIENCE_S = 240


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_two_thousand_cases_make_no_server_error(tmp_path: Path) -> None:
    """The model answers at once with a short word. What streams without an end is left out, and so is what would unload
    the model, for then there would be nothing to ask."""
    backend = FakeBackend(reply=saying("yes", then=256), max_model_len=512)
    async with serving(tmp_path, backend, operator=FolderOperator(tmp_path, "fake")) as api:
        program = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("st")),
            *("run", f"{api.url}/openapi.json", "--seed", "7", "--workers", "1", "--no-shrink", "--checks", CHECKS),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "3", "--continue-on-failure"),
            *("--request-timeout", "20", "--suppress-health-check", "all", "--warnings", "off"),
            *("--exclude-path-regex", "^/admin/(unload|events|estimate|adapters|workers)"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
            env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
        )
        try:
            async with asyncio.timeout(_PATIENCE_S):
                said, _ = await program.communicate()
        finally:
            if program.returncode is None:
                program.kill()
        report = said.decode()
        assert program.returncode == 0, report[-8000:]
        found = re.search(r"(\d+) generated, (\d+) passed", report)
        assert found is not None and int(found[1]) >= FEWEST_CASES, report[-2000:]
