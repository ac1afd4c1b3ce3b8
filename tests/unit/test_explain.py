"""gpuhook explain, of containers that ask for nothing and of words that say nothing."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpuhook.cli import cli


def explain(folder: Path, *words: str, config: str = "") -> Result:
    path = folder / "config.toml"
    path.write_text(config)
    return CliRunner().invoke(cli, ["explain", "--config", str(path), *words])


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("PATH=/bin", "NVIDIA_VISIBLE_DEVICES isn't set"),
        ("NVIDIA_VISIBLE_DEVICES=", "NVIDIA_VISIBLE_DEVICES is empty"),
        ("NVIDIA_VISIBLE_DEVICES= ,", "NVIDIA_VISIBLE_DEVICES is empty"),
        ("NVIDIA_VISIBLE_DEVICES=0,void", "void is among the names in NVIDIA_VISIBLE_DEVICES"),
        ("SWARM=void", "void is among the names in SWARM"),
    ],
)
def test_why_nothing_is_done(tmp_path: Path, word: str, reason: str) -> None:
    done = explain(tmp_path, "-e", word, config='swarm-resource = "SWARM"\n')
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "The container asks for no GPU: nothing is done to it.",
        f"Because: {reason}",
    ]


def test_names_that_do_not_count_have_their_own_reason(tmp_path: Path) -> None:
    config = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
    done = explain(tmp_path, "-e", "NVIDIA_VISIBLE_DEVICES=0", config=config)
    assert "Ignored from environment: the container is not privileged" in done.stdout
    assert "Because" not in done.stdout


@pytest.mark.parametrize("word", ["0,2", "=0", "", "NVIDIA_VISIBLE_DEVICES"])
def test_a_word_without_name_and_value(tmp_path: Path, word: str) -> None:
    done = explain(tmp_path, "-e", word)
    assert done.exit_code == 2
    assert f"-e takes NAME=VALUE, not {word!r}" in done.stderr
