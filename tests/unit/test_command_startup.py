"""The command's first steps: whose packages these are, where things are kept, and a stop before anything has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = "import sys, ericllm_main; sys.exit(ericllm_main.main())"


def ericllm(
    *argv: str, site: Path = ROOT, program: str = RUN, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The command with the modules of `site`, others where those are ours alone, in a small environment."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "HOME": str(site), **variables}
    command = [sys.executable, *(["-S"] if site != ROOT else []), "-c", program, *argv]
    return subprocess.run(command, env=env, cwd=cwd or site, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages, all of them ours."""
    for name in ("ericllm_main.py", "console", "engine", "themes"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "ericllm_main.py").unlink()
    (tmp_path / "ericllm_main.py").write_bytes((ROOT / "ericllm_main.py").read_bytes())
    return tmp_path


def install_another(site: Path, package: str, distribution: str) -> Path:
    """Put another distribution's package of the same name where ours was."""
    folder = site / package
    folder.unlink()
    folder.mkdir()
    (folder / "__init__.py").write_text("print('I am run')")
    (folder / "cli.py").write_text("def main(one, two): ...")
    info = site / f"{distribution}-0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.9\n")
    (info / "RECORD").write_text(f"{package}/__init__.py,,\n{package}/cli.py,,\n")
    return folder


@pytest.mark.parametrize("package", ["console", "engine"])
def test_a_package_of_another_distribution_in_place_of_ours_is_named_in_one_sentence(site: Path, package: str) -> None:
    folder = install_another(site, package, "stranger")
    for argv in (("--version",), ("doctor",)):
        done = ericllm(*argv, site=site)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"ericllm: The package '{package}' in {folder} is that of the distribution stranger. Reinstall ericllm, in "
            "an environment of its own, as pipx and uv tool make one\n"
        )


def test_a_package_that_is_gone_is_named_in_one_sentence(site: Path) -> None:
    (site / "console").unlink()
    done = ericllm("--version", site=site)
    assert done.stderr == "ericllm: The package 'console' of ericllm is missing; reinstall ericllm\n"
    (site / "console").mkdir()  # as pip leaves it where something of its own lies there
    assert ericllm("--version", site=site).stderr.startswith(f"ericllm: The package 'console' in {site}/console is not")


def test_a_package_of_the_current_folder_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("")
    done = ericllm("--version", cwd=tmp_path)
    assert done.stderr == (
        f"ericllm: The package 'engine' in {tmp_path}/engine is found before ericllm's. Take {tmp_path} off the module "
        "path: that is PYTHONPATH, or the current folder\n"
    )


def test_a_module_that_is_no_package_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("print('I am run')")
    done = ericllm("--version", cwd=tmp_path)
    assert done.stdout == ""
    assert done.stderr.startswith(f"ericllm: The package 'engine' in {tmp_path}/engine.py is found before ericllm's.")


def test_the_name_of_a_folder_steers_no_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b]52;c;eA==\x07\u202eb"
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "__init__.py").write_text("")
    said = ericllm("--version", cwd=folder).stderr
    assert "a\\x1b]52;c;eA==\\x07\\u202eb/engine is found before ericllm's" in said
    assert said.rstrip("\n").isprintable()


def test_a_stop_while_modules_are_imported_is_no_traceback() -> None:
    stopping = (
        "import os, signal, sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'console.cli.main': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Stop())\n"
    )
    done = ericllm("--version", program=stopping + RUN)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_next_to_nothing_is_imported_before_a_stop_is_without_a_traceback() -> None:
    watching = (
        "from __future__ import annotations\n"
        "import sys, signal\n"
        "before = set(sys.modules)\n"
        "import ericllm_main\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    assert ericllm(program=watching).stdout == "['ericllm_main']\n"


@pytest.mark.parametrize("missing", ["pydantic", "aiohttp"])
def test_a_package_that_is_missing_is_one_sentence(missing: str, tmp_path: Path) -> None:
    hiding = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {missing!r}: raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    done = ericllm("--headless", "--port", "0", program=hiding + RUN)
    said = f"ericllm: The package '{missing}', which ericllm needs, is missing; reinstall ericllm\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_stop_that_whoever_started_it_ignores_is_ignored() -> None:
    stopping = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "class Stop:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'console.cli.main': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Stop())\n"
    )
    assert ericllm("--version", program=stopping + RUN).stdout.startswith("ericllm ")


WITHOUT_HOME = "import os, pwd\nos.environ.pop('HOME')\ndef unknown(uid): raise KeyError(uid)\npwd.getpwuid = unknown\n"
"""As a container has it that runs under a user id of its host."""


def test_a_user_without_a_home_is_told_what_names_one() -> None:
    done = ericllm("config", "path", program=WITHOUT_HOME + RUN)
    assert done.returncode == 2
    assert done.stderr == (
        "ericllm: There is no home folder to keep settings and state in; name a folder for them in ERICLLM_HOME\n"
    )


def test_all_that_is_kept_lies_in_the_folder_that_is_named(tmp_path: Path) -> None:
    program = WITHOUT_HOME + (
        "import sys, ericllm_main\n"
        "ericllm_main.main()\n"
        "from console.settings.schema import data_dir, log_dir, state_dir\n"
        "from console.tui.theme import user_config_path\n"
        "from engine.backends.common.native_build import cache_folder\n"
        "from engine.models.hub_cache import hub_cache_folder\n"
        "print(data_dir(), log_dir(), state_dir(), user_config_path('ericllm'), cache_folder(), hub_cache_folder())\n"
    )
    done = ericllm("config", "path", program=program, ERICLLM_HOME="kept", XDG_STATE_HOME="/nowhere", cwd=tmp_path)
    assert done.stderr == ""
    folders = done.stdout.split()
    assert len(folders) == 7
    for folder in folders:
        assert Path(folder).is_relative_to(tmp_path / "kept"), folder


def test_a_home_that_leads_nowhere_is_named_in_one_sentence(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    leaving = f"import os\nos.chdir({str(gone)!r})\nos.rmdir({str(gone)!r})\n"
    for home in ("kept", "~nobody-here/kept"):
        gone.mkdir()
        done = ericllm("config", "path", program=leaving + RUN, ERICLLM_HOME=home)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"ericllm: ERICLLM_HOME={home} leads nowhere from here; name a folder by its whole path\n"
        )


def test_a_tilde_that_no_shell_expanded_is_the_home_folder(tmp_path: Path) -> None:
    done = ericllm("config", "path", HOME=str(tmp_path), ERICLLM_HOME="~/kept")
    assert done.stdout == f"{tmp_path}/kept/config/ericllm/config.toml\n"
