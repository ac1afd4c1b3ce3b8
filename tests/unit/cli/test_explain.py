"""gpuhook explain: why nothing is done, what is there in part, and words that say nothing."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from machines import asked, gpu, granted, machine

from gpuhook.cli import cli
from gpuhook.cli.explain import Explanation
from gpuhook.config import Config
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
        ("NVIDIA_VISIBLE_DEVICES=Void", "void is among the names in NVIDIA_VISIBLE_DEVICES"),
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
    grant = granted(asked("all", capabilities=("video",)), machine(gpu(0, 0)))
    explanation.progress.requests.append(grant.request)
    explanation.progress.inventories.append(grant.inventory)
    explanation.resolved = Resolved([grant], Config())
    assert explanation.to_json()["warnings"] == ["video lacks libnvcuvid"]
    assert "Warning:         video lacks libnvcuvid" in explanation.to_text().splitlines()


@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_what_is_printed_is_what_is_done_in_the_mode(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = machine(gpu(0, 3))
    monkeypatch.setattr("gpuhook.inventory.cache.get_inventory", lambda *_, **__: found)
    config = f'nvidia-container-runtime.mode = "{mode}"\n'
    words = ("-e", "NVIDIA_VISIBLE_DEVICES=0")
    text = explain(tmp_path, *words, config=config).stdout
    report = json.loads(explain(tmp_path, *words, "--format", "json", config=config).stdout)
    assert report["mode"] == mode
    undone = {op["kind"] for op in report["undone"]}
    done = {op["kind"] for op in report["operations"]}
    if mode == "hook":
        assert "What the hook does, in order:" in text
        assert "mount the device node /dev/nvidia3 (195:3)" in text
        assert undone == set()
        assert done >= {"allow-device", "proc-driver", "device", "bind", "symlink", "ldcache"}
    else:
        assert "What gpu-py writes into config.json (mode spec), in order:" in text
        assert "make the device node /dev/nvidia3 (195:3)" in text
        assert "What is left undone, because config.json has no words for it:" in text
        assert "add 5 libraries to /etc/ld.so.cache" in text.partition("left undone")[2]
        assert undone == {"proc-driver", "ldcache"}
        assert done == {"allow-device", "device", "bind"}


def test_a_spec_that_gpu_py_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine(gpu(0, 3))
    monkeypatch.setattr("gpuhook.inventory.cache.get_inventory", lambda *_, **__: found)
    spec = tmp_path / "config.json"
    spec.write_text('{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}}')
    done = explain(tmp_path, "--spec", str(spec))
    assert done.exit_code == 1
    assert "Error (spec): " in done.stdout
    assert "no mount namespace of its own" in done.stdout
