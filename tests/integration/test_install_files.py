"""gpuhook install --files after pip, by an ordinary user and beside the Debian package's files."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from harness.commands import run
from harness.installation import Installation
from harness.strangers import AS_STRANGER, folder_of_his

# So that a clone below /root can be read; it gives no right to write anywhere.
READING = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")


@pytest.fixture
def home(workspace: Path) -> Path:
    return folder_of_his(workspace, "home-of-files")


def as_user(home: Path, *words: str | Path) -> str:
    env = ["env", "-i", f"HOME={home}", "PATH=/usr/bin:/bin"]
    return run([*AS_STRANGER, *READING, *env, *words]).ok().stdout


def files(folder: Path) -> Sequence[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_an_ordinary_user_has_pages_and_completion(home: Path, installation: Installation) -> None:
    program = installation.command
    said = as_user(home, program, "install", "--files")
    assert f"wrote {home}/.local/share/man/man1/gpuhook.1\n" in said
    assert f"fpath+=({home}/.local/share/zsh/site-functions)" in said
    placed = files(home)
    assert ".local/share/man/man8/gpu-py.8" in placed
    assert ".config/fish/completions/gpuhook.fish" in placed
    assert not [path for path in placed if path.endswith(".service")]
    assert as_user(home, program, "install", "--files").startswith("unchanged: ")

    page = home / ".local/share/man/man1/gpuhook.1"
    assert "install" in run(["mandoc", page]).ok().stdout
    script = (
        f". {home}/.local/share/bash-completion/completions/gpuhook; "
        f"COMP_WORDS=({program} unins); COMP_CWORD=1; _gpuhook_completion {program}; "
        'echo "${COMPREPLY[@]}"'
    )
    assert as_user(home, "bash", "-c", script) == "uninstall\n"

    as_user(home, program, "uninstall", "--files")
    assert [*home.iterdir()] == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("driver-folder /x --capabilities compute,u", "compute,utility"),
        ("explain -e NVIDIA_DRIVER_CAPABILITIES=compute,u",
         "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        ("expl", "explain"),
    ],
)  # fmt: skip
def test_fish_completes_words_with_commas(
    typed: str, offered: str, installation: Installation
) -> None:
    """Their help may have one, too."""
    script = f"{installation.command} completion fish | source; complete -C 'gpuhook {typed}'"
    path = f"{installation.bin}:/usr/bin:/bin"
    done = run(["fish", "--no-config", "-c", script], env={"PATH": path}).ok()
    word, _, about = done.stdout.removesuffix("\n").partition("\t")
    assert word == offered
    assert not about or ", and" in about


def test_roots_units_are_well_formed(workspace: Path, installation: Installation) -> None:
    system = workspace / "system-of-files"
    run([installation.command, "install", "--files", "--prefix", system]).ok()
    units = sorted((system / "etc/systemd/system").iterdir())
    assert "gpuhook-watch.service" in [unit.name for unit in units]
    for unit in units:
        assert f"ExecStart={installation.command} " in unit.read_text()
        assert run(["systemd-analyze", "verify", "--man=no", unit]).ok().stderr == ""
    run([installation.command, "uninstall", "--files", "--prefix", system]).ok()
    assert files(system) == []
