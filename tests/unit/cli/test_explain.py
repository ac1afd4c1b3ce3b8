"""gpuhook explain: why nothing is done, what is there in part, and words that say nothing."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from machines import gpu, machine

from gpuhook.cli import cli
from gpuhook.cli.explain import Explanation
from gpuhook.inventory.selection import Selection
from gpuhook.request.reader import Request
from gpuhook.resolve import Resolved


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


def test_warnings_are_in_the_text_and_in_the_json() -> None:
    explanation = Explanation()
    assert explanation.to_json()["warnings"] == []
    request = Request("environment", ("all",), selectors=("all",), capabilities=("video",))
    inventory = machine(gpu(0, 0))
    explanation.progress.request, explanation.progress.inventory = request, inventory
    explanation.resolved = Resolved(request, inventory, Selection(inventory.gpus))
    assert explanation.to_json()["warnings"] == ["video lacks libnvcuvid"]
    assert "Warning:         video lacks libnvcuvid" in explanation.to_text().splitlines()
