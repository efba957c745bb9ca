"""The `ericllm` command as a shell sees it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from console.settings.schema import Settings

ROOT = Path(__file__).parents[2]


def ericllm(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "console", *argv],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )


def test_help_names_every_flag() -> None:
    help_text = ericllm("--help").stdout
    assert all(f"--{name.replace('_', '-')}" in help_text for name in Settings.model_fields)


def test_help_imports_little() -> None:
    """The time that it takes is that of its imports."""
    script = (
        "import sys; from console.cli.main import main\n"
        "try: main(['--help'])\n"
        "finally: print(*{name.partition('.')[0] for name in sys.modules}, len(sys.modules), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    *libraries, modules = result.stderr.split()
    assert not {"torch", "numpy", "textual", "rich", "aiohttp", "tokenizers", "safetensors", "asyncio"} & {*libraries}
    assert int(modules) < 320, "280 today"


@pytest.mark.parametrize(
    "argv",
    [
        ("--model", "/no/such/folder"),
        ("--model", "/"),
        ("--max_prompts", "-1"),
        ("--max-prompts=-1",),
        ("--gpu_split", "24,x"),
        ("--gpu-split", "24,x"),
        ("--cache-bits", "5"),
        ("--no-such-flag",),
        ("--num_experts", "2"),
        ("--lora", "/tmp"),
        ("--cache_bits", "6"),
        ("--gpu_split", "8,8"),
        ("--backend", "exllamav2"),
        ("config", "nonsense"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_2(argv: tuple[str, ...]) -> None:
    result = ericllm(*argv, ERICLLM_CONFIG="", HF_HUB_OFFLINE="1")
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert re.match(r"ericllm( config)?: ", result.stderr)


def test_a_state_folder_that_cannot_be_looked_into_is_no_reason_for_a_traceback(tmp_path: Path) -> None:
    result = ericllm("--model", "/no/such/folder", XDG_STATE_HOME=str(tmp_path / ("n" * 300)))
    assert result.stderr == "ericllm: there is no folder /no/such/folder\n"


@pytest.mark.parametrize("flag", ["--max_prompts", "--max-prompts"])
def test_every_flag_has_a_dashed_and_an_underscored_twin(flag: str) -> None:
    assert "max_prompts 0" in ericllm(flag, "0").stderr


def test_config_sample_prints_toml_and_config_path_where_it_belongs(tmp_path: Path) -> None:
    assert "# max_prompts = 16" in ericllm("config", "sample").stdout
    path = ericllm("config", "path", XDG_CONFIG_HOME=str(tmp_path)).stdout.strip()
    assert path == str(tmp_path / "ericllm" / "config.toml")


def test_version_is_printed() -> None:
    assert re.match(r"ericllm \d", ericllm("--version").stdout)
