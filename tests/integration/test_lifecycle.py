"""The life of a container that requests no GPU, which is the same with and without gpu-py."""

import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness.bundles import Bundle, GpuBundle
from harness.commands import Result, path_of, wait_until
from harness.driver import Driver
from harness.installation import write_config
from harness.prefork import ONE, RUNTIMES
from harness.strangers import UID

Step = tuple[str, int, str, str]

# Times and process ids differ from run to run with any runtime, and so do the blanks in tables.
# Adjacent columns of numbers count as one.
VARYING = re.compile(r"[\d ]*\d[\d ]*| {2,}")
STEPS: list[list[str]] = [
    ["state", "NAME"],
    ["start", "NAME"],
    ["start", "NAME"],
    ["state", "NAME"],
    ["list"],
    ["exec", "NAME", "echo", "two  words"],
    ["exec", "NAME", "sh", "-c", "echo out; echo err >&2; exit 3"],
    ["exec", "NAME", "no-such-program"],
    ["exec", "--env", "A=b c", "--cwd", "/etc", "NAME", "sh", "-c", 'echo "$A"; pwd'],
    ["ps", "NAME"],
    ["ps", "--format", "json", "NAME"],
    ["pause", "NAME"],
    ["state", "NAME"],
    ["resume", "NAME"],
    ["state", "NAME"],
    ["update", "--pids-limit", "77", "NAME"],
    ["update", "--no-such-option", "NAME"],
    ["checkpoint", "--image-path", "/proc/none/images", "NAME"],
    ["restore", "--no-such-option", "NAME"],
    ["delete", "NAME"],
    ["kill", "NAME", "NOSUCHSIGNAL"],
    ["kill", "NAME", "KILL"],
]
AFTERWARDS: list[list[str]] = [
    ["state", "NAME"],
    ["exec", "NAME", "true"],
    ["delete", "NAME"],
    ["delete", "NAME"],
    ["delete", "--force", "NAME"],
    ["state", "NAME"],
    ["kill", "NAME", "TERM"],
    ["start", "NAME"],
    ["no-such-verb"],
    ["features"],
    ["--version"],
]


def live(bundle: Bundle, runtime: str | Path, env: dict[str, str]) -> list[Step]:
    """Run all steps of a container's life; return the output and the status of each."""

    def call(words: Sequence[str]) -> Result:
        argv = [bundle.name if word == "NAME" else word for word in words]
        return bundle.call(runtime, *argv, env=env)

    def record(words: Sequence[str]) -> Step:
        done = call(words)
        texts = [VARYING.sub("_", text) for text in (done.stdout, done.stderr)]
        return " ".join(words), done.status, texts[0], texts[1]

    created = create(bundle, runtime, env)
    steps: list[Step] = [("create", created, VARYING.sub("_", output_of(bundle)), "")]
    steps += [record(words) for words in STEPS]
    wait_until(lambda: '"stopped"' in call(["state", "NAME"]).stdout, "the container stopped")
    return steps + [record(words) for words in AFTERWARDS]


def create(bundle: Bundle, runtime: str | Path, env: dict[str, str]) -> int:
    """Create the container with its output in a file, because the runtime would keep our pipe."""
    with (bundle.path / "output").open("wb") as file:
        words = [runtime, "create", "--bundle", bundle.path, bundle.name]
        argv = bundle.namespace.enter("env", *(f"{k}={v}" for k, v in env.items()), *words)
        done = subprocess.run(
            argv, cwd=bundle.path, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False
        )
    return done.returncode


def output_of(bundle: Bundle) -> str:
    return (bundle.path / "output").read_text()


def test_a_container_without_gpus_behaves_the_same_through_its_life(bundle: GpuBundle) -> None:
    bundle.command("sleep", "1000")
    spec = bundle.config.read_bytes()
    alone = path_of(bundle.runtime)  # crun 1.28 names itself by the path that it was called by
    without = live(bundle, alone, bundle.env)
    assert without[0][:3] == ("create", 0, "")
    assert {status for _, status, _, _ in without} > {0, 3}
    with_gpu_py = live(bundle, bundle.gpu_py, bundle.env)
    for ours, theirs in zip(with_gpu_py, without, strict=True):
        assert ours == theirs
    assert bundle.config.read_bytes() == spec


def test_statistics_are_the_low_level_runtimes(bundle: GpuBundle) -> None:
    bundle.command("sleep", "1000")
    assert create(bundle, bundle.gpu_py, bundle.env) == 0
    bundle.call(bundle.runtime, "start", bundle.name).ok()
    words = ["events", "--stats", bundle.name]
    ours = bundle.call(bundle.gpu_py, *words, env=bundle.env)
    theirs = bundle.call(bundle.runtime, *words)
    assert ours.status == theirs.status
    if ours.status == 0:
        told = [json.loads(done.stdout) for done in (ours, theirs)]
        assert told[0].keys() == told[1].keys()
        assert told[0]["id"] == told[1]["id"] == bundle.name
    else:
        assert (ours.stdout, ours.stderr) == (theirs.stdout, theirs.stderr)


# The hook reads its input; otherwise crun sometimes reports a broken pipe.
FAILING = {"path": "/bin/sh", "args": ["sh", "-c", "cat >/dev/null; exit 3"]}


@pytest.mark.parametrize(
    "mutate",
    [
        pytest.param(lambda spec: spec["process"].update(args=["no-such-program"]), id="program"),
        pytest.param(lambda spec: spec["process"].update(cwd="relative"), id="cwd"),
        pytest.param(lambda spec: spec["root"].update(path="/proc/none"), id="root"),
        pytest.param(lambda spec: spec["mounts"].append({"destination": "/x"}), id="mount"),
        pytest.param(lambda spec: spec.update(hooks={"prestart": [FAILING]}), id="hook"),
    ],
)
@RUNTIMES
def test_errors_in_config_json_are_the_low_level_runtimes(
    bundle: GpuBundle, mutate: object
) -> None:
    """The user reads the low-level runtime's own message about a bad config.json."""
    assert callable(mutate)
    bundle.change(mutate)
    found = []
    for runtime in (bundle.runtime, bundle.gpu_py):
        status = create(bundle, runtime, bundle.env)
        found.append((status, VARYING.sub("_", output_of(bundle))))
        bundle.call(bundle.runtime, "delete", "--force", bundle.name)
    assert found[0] == found[1]
    assert found[0][1] or found[0][0] == 0


def settle(config: Path) -> None:
    """Set a configuration's times to the past, as if it wasn't just written."""
    past = time.time() - 10
    for place in (config, config.parent):
        os.utime(place, (past, past))


def test_a_running_container_keeps_its_low_level_runtime(
    bundle: GpuBundle, driver: Driver, tmp_path: Path
) -> None:
    """Python handles the first call after the change; later calls work without Python."""
    mine = bundle.runtime
    [other] = {"runc", "crun"} - {mine}
    bundle.command("sleep", "1000")
    config = write_config(tmp_path / "etc", driver.root, [mine])
    env = {"GPUHOOK_CONFIG": str(config)}
    assert create(bundle, bundle.gpu_py, env) == 0
    bundle.call(bundle.gpu_py, "start", bundle.name, env=env).ok()
    config.write_text(config.read_text().replace(mine, other))
    settle(config)
    for _ in range(3):  # first by Python, which saves data for the launcher; then without it
        words = ("exec", bundle.name, "echo", "mine")
        assert bundle.call(bundle.gpu_py, *words, env=env).ok().stdout == "mine\n"
    bundle.call(bundle.gpu_py, "kill", bundle.name, "KILL", env=env).ok()
    bundle.call(bundle.gpu_py, "delete", "--force", bundle.name, env=env).ok()
    assert bundle.call(mine, "state", bundle.name).status != 0


@pytest.mark.protects(
    "own-runtime-folder", "the launcher ignores an XDG_RUNTIME_DIR that another user owns"
)
@pytest.mark.protects(
    "own-runtime-dir", "the Python runtime also ignores an XDG_RUNTIME_DIR that another user owns"
)
@ONE
def test_a_runtime_folder_of_another_user_is_ignored(
    bundle: GpuBundle, driver: Driver, tmp_path: Path
) -> None:
    """su leaves a user's XDG_RUNTIME_DIR in root's environment; crun uses it, and runc doesn't."""
    tmp_path.chmod(0o755)
    his = tmp_path / "his"
    kept = his / "crun" / bundle.name / "status"
    kept.parent.mkdir(parents=True)
    kept.touch()
    os.chown(his, UID, UID)
    config = write_config(tmp_path / "etc", driver.root, ["runc"])
    env = {"GPUHOOK_CONFIG": str(config)}
    bundle.command("sleep", "1000")
    assert create(bundle, bundle.gpu_py, env) == 0
    settle(config)
    for _ in range(3):  # first by Python, which saves data for the launcher; then without it
        words = ("state", bundle.name)
        said = bundle.call(bundle.gpu_py, *words, env={**env, "XDG_RUNTIME_DIR": str(his)})
        assert json.loads(said.ok().stdout)["status"] == "created"
    bundle.call(bundle.gpu_py, "delete", "--force", bundle.name, env=env).ok()
