"""Command lines that engines and people use for runc and crun, which gpu-py accepts."""

import shutil
from pathlib import Path

import pytest
from harness.bundles import Bundle, GpuBundle
from harness.driver import Driver
from harness.inside import look, seen
from harness.prefork import ONE, RUNTIMES
from harness.snapshot import nothing_left

Words = list[str | Path]

# Command lines. The tests replace {root} (the runtime's state folder), {bundle}, {log}, {pidfile}.
COMMAND_LINES: dict[str, tuple[list[str], list[str]]] = {
    "no options": ([], ["--bundle", "{bundle}"]),
    "state folder": (["--root", "{root}"], ["--bundle", "{bundle}"]),
    "glued values": (["--root={root}", "--debug"], ["--bundle={bundle}"]),
    "as Docker does": (
        ["--root", "{root}", "--log", "{log}", "--log-format", "json"],
        ["--bundle", "{bundle}", "--pid-file", "{pidfile}"],
    ),
    "as podman does": ([], ["--bundle", "{bundle}", "--pid-file", "{pidfile}"]),
    "booleans first": (["--debug", "--root", "{root}", "--log={log}"], ["-b", "{bundle}"]),
    "short option": (["--root", "{root}"], ["-b", "{bundle}", "--no-pivot"]),
    "pid file first": (["--root", "{root}"], ["--pid-file={pidfile}", "--bundle={bundle}"]),
    "relative bundle": (["--root", "{root}"], ["--bundle", "."]),
    "working directory": (["--root", "{root}"], []),
}


def fill(words: list[str], bundle: Bundle, folder: Path) -> list[str]:
    """Replace the placeholders in ``words`` by the paths of this test."""
    places = {
        "root": folder / "runtime",
        "bundle": bundle.path,
        "log": folder / "log.json",
        "pidfile": folder / "pid",
    }
    return [word.format(**places) for word in words]


@pytest.mark.parametrize(("options", "create"), COMMAND_LINES.values(), ids=COMMAND_LINES.keys())
@RUNTIMES
def test_create_start_and_delete_command_lines_give_the_requested_gpu(
    bundle: GpuBundle, driver: Driver, tmp_path: Path, options: list[str], create: list[str]
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*look())
    runtime: Words = [bundle.gpu_py, *fill(options, bundle, tmp_path)]
    argv: Words = [*runtime, "create", *fill(create, bundle, tmp_path), bundle.name]
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        inside = seen(bundle.live(argv, runtime, bundle.name, bundle.env))
    assert inside.gpu_minors == {driver.gpus[5].minor}


@pytest.mark.parametrize("name", ["create", "run", "exec", "delete"])
@RUNTIMES
def test_a_container_named_like_a_verb_gets_its_gpu(
    bundle: GpuBundle, driver: Driver, tmp_path: Path, name: str
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*look())
    runtime: Words = [bundle.gpu_py, "--root", tmp_path / "runtime"]
    argv: Words = [*runtime, "create", "--bundle", bundle.path, name]
    inside = seen(bundle.live(argv, runtime, name, bundle.env))
    assert inside.gpu_minors == {driver.gpus[5].minor}


@RUNTIMES
def test_run_in_the_working_directory_gives_the_requested_gpu(
    bundle: GpuBundle, driver: Driver
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*look())
    inside = seen(bundle.call(bundle.gpu_py, "run", bundle.name, env=bundle.env))
    assert inside.gpu_minors == {driver.gpus[5].minor}


@RUNTIMES
def test_a_bundle_path_with_shell_characters_is_used(
    bundle: GpuBundle, driver: Driver, tmp_path: Path
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*look())
    folder = tmp_path / "a $(b) 'c' \"d\" *"
    folder.mkdir()
    shutil.copy(bundle.config, folder)
    argv: Words = [bundle.gpu_py, "run", "--bundle", folder, bundle.name]
    inside = seen(bundle.call(*argv, env=bundle.env))
    assert inside.gpu_minors == {driver.gpus[5].minor}


@pytest.mark.protects(
    "unclear-arguments", "a command line that runtimes interpret differently is refused"
)
@pytest.mark.parametrize(
    "words", [["-b=b"], ["-bb"], ["-bundle", "b"], ["--bun=b"]], ids=lambda words: words[0]
)
@ONE
def test_an_ambiguous_bundle_option_is_refused(bundle: GpuBundle, words: list[str]) -> None:
    """``-b=b`` is the folder b for runc and the folder =b for crun."""
    bundle.environ("NVIDIA_VISIBLE_DEVICES=5")
    for name in ("b", "=b", "undle"):
        (bundle.path / name).mkdir()
        shutil.copy(bundle.config, bundle.path / name)
    done = bundle.call(bundle.gpu_py, "run", *words, bundle.name, env=bundle.env).failed()
    assert done.stderr.startswith(f"gpu-py: It isn't clear what '{words[0]}' means to ")


@pytest.mark.parametrize("spelled", [["--config", "{}"], ["-f", "{}"], ["--config={}"]], ids=str)
@RUNTIMES
def test_another_config_without_a_device_request_is_left_to_the_runtime(
    bundle: GpuBundle, spelled: list[str]
) -> None:
    """crun reads the other config in place of the bundle's, and runc reports the unknown option."""
    bundle.command("echo", "from the other")
    other = bundle.path / "other.json"
    bundle.config.rename(other)
    words = [word.format(other) for word in spelled]
    ours = bundle.call(bundle.gpu_py, "run", *words, bundle.name, env=bundle.env)
    theirs = bundle.call(bundle.runtime, "run", *words, bundle.name)
    assert (ours.status, ours.stdout) == (theirs.status, theirs.stdout)
    assert ours.stdout == ("from the other\n" if bundle.runtime == "crun" else theirs.stdout)
    # runc prints the time before level=, so only the rest is compared.
    assert ours.stderr.partition("level=")[2] == theirs.stderr.partition("level=")[2]


@pytest.mark.protects(
    "other-config",
    "a device request in a config.json other than the bundle's is refused",
    only="another_config_that_asks and runc-host",
)
@RUNTIMES
def test_another_config_that_asks_for_a_gpu_is_refused(bundle: GpuBundle, driver: Driver) -> None:
    """gpu-py refuses it whatever the bundle's config contains, unless both are one file."""
    bundle.environ("NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*look())
    asking = bundle.config.read_text()
    other = bundle.path / "other.json"
    other.write_text(asking)
    bundle.config.write_text(asking.replace("NVIDIA_VISIBLE_DEVICES=5", "A=b"))
    words = ["run", "--bundle", str(bundle.path), "--config"]
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        done = bundle.call(bundle.gpu_py, *words, other, bundle.name, env=bundle.env).failed()
    assert done.stderr.startswith(f"gpu-py: The container requests devices in {other}, which isn't")
    bundle.config.write_text(asking)
    for same in (bundle.config, "config.json"):
        done = bundle.call(bundle.gpu_py, *words, same, bundle.name, env=bundle.env)
        if bundle.runtime == "crun":
            assert seen(done).gpu_minors == {driver.gpus[5].minor}
        else:
            assert "config" in done.failed().stderr  # an error of runc itself


@pytest.mark.parametrize("named", ["missing", "a folder", "no JSON"])
@RUNTIMES
def test_an_unreadable_config_option_fails_with_the_runtimes_own_error(
    bundle: GpuBundle, named: str
) -> None:
    other = bundle.path / "other.json"
    if named == "a folder":
        other.mkdir()
    elif named == "no JSON":
        other.write_text("{")
    words = ["run", "--config", str(other), bundle.name]
    ours = bundle.call(bundle.gpu_py, *words, env=bundle.env).failed()
    theirs = bundle.call(bundle.runtime, *words).failed()
    assert ours.stderr.partition("level=")[2] == theirs.stderr.partition("level=")[2]


@ONE
def test_gpu_py_works_when_started_through_a_symlink(
    bundle: GpuBundle, driver: Driver, tmp_path: Path
) -> None:
    """/usr/local/bin/gpu-py may be a link into a virtual environment."""
    link = tmp_path / "gpu-py"
    link.symlink_to(bundle.gpu_py)
    bundle.environ("NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*look())
    inside = seen(bundle.run(link, bundle.env))
    assert inside.gpu_minors == {driver.gpus[5].minor}
