"""The launcher, which does without Python only what Python would have done."""

import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher_inputs import command_lines, specs
from launchers import Builds, Installed, Probe
from machines import read_request
from timeouts import in_time

from gpuhook.base.config.loader import load, loads
from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError
from gpuhook.base.names import CREATING_VERBS, ENGINES_RUNTIME
from gpuhook.base.oci.runtime_argv import Arguments
from gpuhook.prefork import launcher_cache
from gpuhook.runtime_shim import find_runtime

# Command lines -----------------------------------------------------------------------------


@settings(max_examples=400)
@given(argv=command_lines)
def test_the_launcher_agrees_with_python_on_any_command_line(probe: Probe, argv: list[str]) -> None:
    """The launcher passes on a create call with the bundle that Python reads, or not at all.

    tests/integration/test_parsers.py compares both with real runtimes, also where Python finds
    a command line unclear.
    """
    verb, bundle, *_ = probe.arguments(argv)
    assert verb in ("pass", "create", "")
    arguments = Arguments(argv)
    if arguments.verb in CREATING_VERBS:
        assert verb != "pass"
        assert verb != "create" or bundle == (arguments.bundle or ".")


# The launcher's results for a command line: the verb, the bundle, and whether it asks the prefork
# server. Python's results: the verb, the bundle, and the word that is unclear.
Case = tuple[str, tuple[str, str, bool], tuple[str, str | None, str]]
CASES: dict[str, Case] = {
    "docker create": (
        "--root /r --log /l --log-format json create --bundle /b --pid-file /p ID",
        ("create", "/b", True),
        ("create", "/b", ""),
    ),
    "docker start": (
        "--root /r --log /l --log-format json start ID",
        ("pass", ".", False),
        ("start", None, ""),
    ),
    "docker delete": (
        "--root /r --log /l --log-format json delete --force ID",
        ("pass", ".", False),
        ("delete", None, ""),
    ),
    "docker exec": (
        "--root /r --log /l exec --process /p --detach --pid-file /f ID",
        ("pass", ".", False),
        ("exec", None, ""),
    ),
    "systemd": (
        "--root /r --systemd-cgroup create --bundle /b ID",
        ("create", "/b", True),
        ("create", "/b", ""),
    ),
    "podman create": (
        "create --bundle /u --pid-file /p ID", ("create", "/u", True), ("create", "/u", ""),
    ),
    "podman crun": (
        "--systemd-cgroup --root=/r create --bundle /u ID",
        ("create", "/u", True),
        ("create", "/u", ""),
    ),
    "podman run": ("run -d -b /u ID", ("create", "/u", True), ("run", "/u", "")),
    "podman info": ("--version", ("pass", ".", False), ("", None, "")),
    "version of what": ("--version ID", ("", ".", False), ("", None, "")),
    "a working directory": ("create ID", ("create", ".", True), ("create", None, "")),
    "a container called create": ("start create", ("pass", ".", False), ("start", None, "")),
    "a folder called start": (
        "--root start create --bundle delete ID",
        ("create", "delete", True),
        ("create", "delete", ""),
    ),
    "an option after the id": (
        "create ID --bundle /b", ("create", "/b", False), ("", None, "--bundle"),
    ),
    "two ids": ("create --bundle /b ID OTHER", ("create", "/b", False), ("", "/b", "")),
    "no id": ("create --bundle /b", ("create", "/b", False), ("", "/b", "")),
    "no bundle": ("create --bundle= ID", ("", "", True), ("", None, "--bundle=")),
    "nothing after an option": ("create ID --bundle", ("", ".", False), ("", None, "--bundle")),
    "a short option and a sign": ("create -b=/b ID", ("", ".", False), ("", None, "-b=/b")),
    "a short option and its value": ("create -b/b ID", ("", ".", False), ("", None, "-b/b")),
    "another config.json": (
        "create --config /c ID", ("", ".", False), ("create", None, ""),
    ),
    "another config.json, in short": (
        "create -f /c ID", ("", ".", False), ("create", None, ""),
    ),
    "another config.json and a sign": (
        "create -f=/c ID", ("", ".", False), ("", None, "-f=/c"),
    ),
    "a flag with a value": ("--debug=true create ID", ("", ".", False), ("create", None, "")),
    "an option of crun's": ("--criu /c create ID", ("create", ".", True), ("", None, "--criu")),
    "an option of nobody's": ("--what create ID", ("", ".", False), ("", None, "--what")),
    "a lonely dash": ("create - ID", ("", ".", False), ("", None, "-")),
    "another verb": ("restore ID", ("", ".", False), ("restore", None, "")),
    "nothing": ("", ("", ".", False), ("", None, "")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_launcher_and_python_parse_command_lines_alike(probe: Probe, case: Case) -> None:
    """The launcher leaves command lines without a known verb to Python."""
    line, by_launcher, by_python = case
    verb, bundle, is_usual, _ = probe.arguments(line.split())
    assert (verb, bundle, is_usual) == by_launcher
    arguments = Arguments(line.split())
    assert (arguments.verb, arguments.bundle, arguments.unclear) == by_python


# Words -------------------------------------------------------------------------------------


NVIDIAS = "NVIDIA_CTK_CONFIG_FILE_PATH"


CONFIGS = [
    Config(),
    loads("accept-nvidia-visible-devices-as-volume-mounts = true\n"),
    loads('swarm-resource = "DOCKER_RESOURCE_GPU, nvidia=other"\n'),
    loads('[nvidia-container-runtime]\nmode = "cdi"\n'),
    loads(
        '[nvidia-container-runtime.modes.cdi]\nannotation-prefixes = ["a.b/c-", "x/"]\n'
        "[gpuhook]\naccept-annotations = true\n"
    ),
]


@settings(max_examples=400)
@given(st.sampled_from(CONFIGS), specs)
def test_every_request_contains_a_trigger_string(config: Config, text: str) -> None:
    words = launcher_cache.words(config)
    assert words is not None
    try:
        asks = read_request(json.loads(text), config).devices is not None
    except GpuhookError:
        asks = True
    assert not asks or any(word in text for word in words)


def test_characters_escaped_by_engines_match_no_trigger_string() -> None:
    """Go's encoder escapes some characters by itself (< > &); they must not cost a Python start."""
    words = launcher_cache.words(Config())
    assert words is not None
    assert not any(word in "\\u0026\\u0026 \\u003c \\u003e \\u2028" for word in words)


def test_ignored_annotations_are_no_trigger_strings() -> None:
    assert "cdi.k8s.io" not in (launcher_cache.words(Config()) or ())
    text = "[gpuhook]\naccept-annotations = true\n"
    assert "cdi.k8s.io" in (launcher_cache.words(loads(text)) or ())


def test_no_trigger_string_begins_with_a_part_of_the_end_marker() -> None:
    words = launcher_cache.words(Config())
    assert words is not None
    assert not {word[0] for word in words} & set(launcher_cache.END_MARKER)
    assert not (launcher_cache.PATH_CHARACTERS | {"\\"}) & set(launcher_cache.END_MARKER)


def test_no_trigger_strings_are_saved_for_a_non_ascii_setting() -> None:
    assert launcher_cache.words(loads('swarm-resource = "é"\n')) is None
    assert launcher_cache.words(loads('swarm-resource = "a b"\n')) is not None


# The whole script --------------------------------------------------------------------------


def test_python_is_run_until_its_cache_is_saved(installed: Installed) -> None:
    installed.config.touch()
    assert installed.run("state", "ID") == "python runtime-save"
    installed.configure()
    assert installed.run("state", "ID") == "runc state ID"
    assert installed.create("{}") == "runc"
    assert installed.create('{"env":"NVIDIA_VISIBLE_DEVICES"}') == "python"
    assert installed.create('{"env":"\\u004e"}') == "python"
    assert installed.run("state", "--future", "ID") == "runc state --future ID"
    assert installed.run("--future", "state", "ID") == "python runtime"


def test_outside_a_virtual_environment_the_packages_folder_names_the_python(
    installed: Installed,
) -> None:
    """pip installs both where its Python is, whatever version /usr/bin/python3 has."""
    venv = installed.bin.parent
    (venv / "pyvenv.cfg").unlink()
    (venv / "lib/python3.11").rename(venv / "lib/python3.99")
    (installed.bin / "python3").rename(installed.bin / "python3.99")
    assert installed.create("{}").startswith("python")
    (venv / "lib/python3.99").rename(venv / "lib/python3.98")
    installed.log.unlink()
    words = [str(installed.bin / "gpu-py"), "create", "--bundle", str(installed.bundle), "ID"]
    environment = {"PATH": "/usr/bin:/bin", "GPUHOOK_CONFIG": str(installed.config)}
    subprocess.run(words, env=environment, check=False, capture_output=True)
    assert not installed.log.exists()  # the system's Python ran


def test_an_editable_install_runs_the_python_beside_it(installed: Installed) -> None:
    """No folder names the version there, and a Python that was built by hand has the package."""
    venv = installed.bin.parent
    (venv / "pyvenv.cfg").unlink()
    (venv / "lib").rename(venv / "elsewhere")
    assert installed.create("{}").startswith("python")


def test_a_missing_bundle_is_left_to_python(installed: Installed) -> None:
    installed.configure()
    assert installed.run("create", "--bundle", "/nonexistent", "ID") == "python runtime"


def _write_over(config: Path) -> None:
    config.write_text("# changed\n")


def _write_over_with_an_older_one(config: Path) -> None:
    """Overwrite the same file with an older modification time, as cp -p does."""
    config.write_text("# of another day\n")
    os.utime(config, (1, 1))


def _put_an_older_one_there(config: Path) -> None:
    older = config.with_name("older.toml")
    older.touch()
    os.utime(older, (1, 1))
    older.rename(config)


@pytest.mark.parametrize(
    "change", [_write_over, _write_over_with_an_older_one, _put_an_older_one_there]
)
def test_a_changed_configuration_is_detected(
    installed: Installed, change: Callable[[Path], None]
) -> None:
    installed.configure()
    change(installed.config)
    assert installed.run("state", "ID") == "python runtime-save"


def set_times(*places: Path) -> None:
    """Set files and folders to one time long ago, as Nix does."""
    for place in places:
        os.utime(place, (10**9, 10**9))


def test_a_configuration_of_equal_time_in_another_folder_is_detected(installed: Installed) -> None:
    """With Nix, links lead to a file of the year 1970, and later to another such file."""
    files = [installed.folder / name / "config.toml" for name in ("old", "new")]
    for file in files:
        file.parent.mkdir()
        file.write_text("# one of two\n")
        set_times(file, file.parent)
    current = installed.folder / "current"
    current.symlink_to("old")
    installed.config.symlink_to(current / "config.toml")
    set_times(installed.config.parent)
    launcher_cache.save(str(installed.config))
    assert installed.run("state", "ID") == "runc state ID"
    current.unlink()
    current.symlink_to("new")
    assert installed.run("state", "ID") == "python runtime-save"


WORDLESS = {
    "limits": '[gpuhook.limits]\nmost-device-memory = "8GiB"\n',
    "required": "[gpuhook.limits]\nrequired = true\n",
    "swarm": 'swarm-resource = "é"\n',
}


@pytest.mark.protects(
    "words-for-all",
    "the launcher ignores trigger strings cached for another configuration",
    instead="found = words(config) or ()",
)
@pytest.mark.parametrize("name", WORDLESS)
def test_trigger_strings_of_another_configuration_are_ignored(
    installed: Installed, name: str
) -> None:
    """The links lead to files of the same time, so only the content of the new file differs."""
    texts = {"old": "", "new": WORDLESS[name]}
    for folder, text in texts.items():
        file = installed.folder / folder / "config.toml"
        file.parent.mkdir()
        file.write_text(text)
        set_times(file, file.parent)
    current = installed.folder / "current"
    current.symlink_to("old")
    installed.config.symlink_to(current / "config.toml")
    set_times(installed.config.parent)
    launcher_cache.save(str(installed.config))
    assert installed.create("{}") == "runc"
    current.unlink()
    current.symlink_to("new")
    launcher_cache.save(str(installed.config))
    assert installed.create("{}") == "python"
    assert installed.run("state", "ID") == "runc state ID"


def test_a_cache_that_cannot_be_written_stays_unchanged(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be full, or the process may be killed, before the file has its name."""
    installed.configure()
    before = cache_of(installed).read_bytes()

    def fail(*_words: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "rename", fail)
    monkeypatch.setattr(os, "replace", fail)
    installed.config.write_text(WORDLESS["limits"])
    set_times(installed.config, installed.config.parent)
    launcher_cache.save(str(installed.config))
    assert cache_of(installed).read_bytes() == before
    assert installed.create("{}") == "python"


def test_a_configuration_with_a_reset_time_is_never_cached(installed: Installed) -> None:
    """A file that is written over it (cp -p) could have the same time and identity."""
    installed.config.touch()
    for place in (installed.config, installed.config.parent):
        os.utime(place, (1, 1))
    launcher_cache.save(str(installed.config))
    assert installed.run("state", "ID") == "python runtime-save"
    assert installed.run("state", "ID") == "python runtime-save"


def test_a_configuration_changed_while_it_is_read_is_detected(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (installed.folder / name for name in ("old.toml", "new.toml"))
    for file in (old, new):
        file.touch()
    installed.config.symlink_to(old)
    set_times(old, new, installed.config.parent)

    def load_then_switch(path: str | None) -> Config:
        config = load(path)
        installed.config.unlink()
        installed.config.symlink_to(new)
        set_times(installed.config.parent)
        return config

    monkeypatch.setattr(launcher_cache, "load", load_then_switch)
    launcher_cache.save(str(installed.config))
    assert installed.run("state", "ID") == "python runtime-save"


def test_configured_runtimes_are_tried_in_order(installed: Installed) -> None:
    installed.runtime("crun")
    names = f'"none-such", "/none", "{installed.path}/crun", "runc"'
    installed.configure(f"[nvidia-container-runtime]\nruntimes = [{names}]")
    assert installed.run("state", "ID") == "crun state ID"
    (installed.path / "crun").unlink()
    assert installed.run("state", "ID") == "runc state ID"


def test_a_missing_runtime_is_left_to_python(installed: Installed) -> None:
    text = f'[nvidia-container-runtime]\nruntimes = ["none-such", "{installed.path}/runc"]'
    installed.configure(text)
    (installed.path / "runc").chmod(0o644)
    assert installed.run("state", "ID") == "python runtime"


def cache_of(installed: Installed) -> Path:
    return Path(f"{installed.saved}{installed.config}", launcher_cache.CACHE)


@pytest.mark.protects(
    "cache-cut-short",
    "a truncated cache of the launcher is detected and not used",
    instead="return trigger_count > 0;",
)
def test_a_truncated_cache_is_left_to_python(installed: Installed) -> None:
    """The launcher neither waits for such a cache nor takes it for the configuration.

    The cache is cut at the end of each line, and one byte before and after that.
    """
    installed.configure()
    file = cache_of(installed)
    whole, status = file.read_bytes(), file.stat()
    with in_time(900):
        ends = {at + more for at, byte in enumerate(whole) if byte == 10 for more in (-1, 0, 1)}
        for length in sorted({0, *(end for end in ends if end < len(whole))}):
            file.write_bytes(whole[:length])
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
            assert installed.run("state", "ID") == "python runtime-save", length
        file.write_bytes(whole)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert installed.create("{}") == "runc"
    assert installed.create('{"env":"INTEL_VISIBLE_NPUS"}') == "python"


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "NULs": lambda whole: bytes(len(whole)),
    "no lines": lambda _: b"\n\n\n",
    "the end alone": lambda _: f"{launcher_cache.END_MARKER}\n".encode(),
    "another inode": lambda whole: whole.replace(b" ", b" 1", 1),
    "another time": lambda whole: whole.replace(b"\n", b"1\n", 1),
    "an empty trigger": lambda whole: whole.replace(b"\nCUDA_VERSION\n", b"\n\n"),
    "more after the end": lambda whole: whole + b"x\n",
    "larger than any": lambda whole: whole.replace(b"\nCUDA", b"\n" + b"x" * (1 << 16) + b"\nCUDA"),
    "too many triggers": lambda whole: whole.replace(b"\nCUDA", b"\nx" * 1024 + b"\nCUDA"),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_a_damaged_cache_is_left_to_python(
    installed: Installed, spoil: Callable[[bytes], bytes]
) -> None:
    installed.configure()
    file = cache_of(installed)
    status = file.stat()
    spoiled = spoil(file.read_bytes())
    assert spoiled != file.read_bytes()
    file.write_bytes(spoiled)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with in_time():
        assert installed.run("state", "ID") == "python runtime-save"
        assert installed.create("{}") == "python"


def test_launcher_is_never_its_own_runtime(installed: Installed) -> None:
    installed.runtime("crun")
    (installed.path / "runc").unlink()
    (installed.path / "runc").symlink_to(installed.bin / "gpu-py")
    text = f'[nvidia-container-runtime]\nruntimes = ["{installed.path}/runc", "crun"]'
    installed.configure(text)
    assert installed.run("state", "ID") == "crun state ID"


@pytest.mark.parametrize("runtime", ["dir/runc", "./runc", "ru nc", "a:b", "é"])
def test_unusual_runtime_names_are_left_to_python(installed: Installed, runtime: str) -> None:
    installed.configure(f'[nvidia-container-runtime]\nruntimes = ["{runtime}"]')
    assert installed.run("state", "ID") == "python runtime-save"


def test_environment_and_odd_arguments_are_passed_unchanged(installed: Installed) -> None:
    installed.configure()
    odd = ["two words", "", "*", "$(id)", "new\nline", "\\", "-n", "é"]
    environ = {
        "name": "n", "word": "w", "config": "c", "LD_LIBRARY_PATH": "/nowhere",
        "EMPTY": "", "TWO": "one\ntwo", "QUOTES": "'\"`$(id)", "PWD": str(Path.cwd()),
    }  # fmt: skip
    assert installed.run("exec", "ID", *odd, env=environ).startswith("runc exec ID two words  * ")
    found = (installed.folder / "log.env").read_bytes().decode().split("\0")
    assert {f"{name}={value}" for name, value in environ.items()} <= set(found)
    assert len([entry for entry in found if entry]) == len(environ) + 2  # PATH, GPUHOOK_CONFIG


def test_nvidias_variable_names_the_configuration_unless_ours_does(installed: Installed) -> None:
    installed.configure()
    other = str(installed.config)
    found = installed.run("state", "ID", env={"GPUHOOK_CONFIG": "", NVIDIAS: other})
    assert found == "runc state ID"
    assert installed.run("state", "ID", env={NVIDIAS: "/nowhere/config.toml"}) == found
    nowhere = {"GPUHOOK_CONFIG": "", NVIDIAS: "/nowhere/config.toml"}
    assert installed.run("state", "ID", env=nowhere) == "python runtime"


ENGINES = [("/crun", "crun"), ("crun", "runc"), ("", "runc"), ("/none", "runc")]


@pytest.mark.parametrize(("engines", "used"), ENGINES)
@pytest.mark.parametrize("names", [None, ["runc"], ["", "runc"]])
def test_the_engines_runtime_is_preferred_unless_configured(
    installed: Installed, names: list[str] | None, engines: str, used: str
) -> None:
    """The environment names it by an absolute path, and Python finds the same runtime."""
    installed.runtime("crun")
    text = "" if names is None else f"[nvidia-container-runtime]\nruntimes = {json.dumps(names)}"
    installed.configure(text)
    own = f"{installed.path}{engines}" if engines.startswith("/") else engines
    line = "state ID"
    expected = used if names is None else "runc"
    assert installed.run(*line.split(), env={ENGINES_RUNTIME: own}) == f"{expected} {line}"
    candidates = loads(text).low_level_runtimes(own)
    found = find_runtime(candidates, os.fsencode(installed.path), str(installed.bin / "gpu-py"))
    assert found == str(installed.path / expected)


@pytest.mark.parametrize("maker", ["crun", "runc"])
def test_the_creating_runtime_is_preferred_over_the_engines(
    installed: Installed, maker: str
) -> None:
    installed.runtime("crun")
    installed.configure()
    [other] = {"crun", "runc"} - {maker}
    kept = installed.folder / "root/ID" / {"crun": "status", "runc": "state.json"}[maker]
    kept.parent.mkdir(parents=True)
    kept.touch()
    words = ("--root", str(installed.folder / "root"), "state", "ID")
    assert installed.run(*words, env={ENGINES_RUNTIME: f"{installed.path}/{other}"}).startswith(
        maker
    )


@pytest.fixture
def unconfigured(installed: Installed, builds: Builds) -> Installed:
    """A launcher without config.toml and without a cache from Python, with runtimes in PATH."""
    installed.install(builds.bare)
    return installed


NO_CONFIG = {"GPUHOOK_CONFIG": ""}


def test_without_config_the_default_runtimes_are_tried_in_order(unconfigured: Installed) -> None:
    environ = {**NO_CONFIG, "PATH": str(unconfigured.path)}
    names = Config().runtimes
    for name in names:
        unconfigured.program(
            unconfigured.path / name, f'#!/bin/sh\necho {name} "$@" >{unconfigured.log}\n'
        )
    last = {**environ, ENGINES_RUNTIME: str(unconfigured.path / names[-1])}
    assert unconfigured.run("kill", "ID", "9", env=last) == f"{names[-1]} kill ID 9"
    for name in names:
        assert unconfigured.run("kill", "ID", "9", env=environ) == f"{name} kill ID 9"
        (unconfigured.path / name).unlink()


def test_without_config_each_default_trigger_string_starts_python(unconfigured: Installed) -> None:
    def create(text: str) -> str:
        (unconfigured.bundle / "config.json").write_text(text)
        words = ("create", "--bundle", str(unconfigured.bundle), "ID")
        return unconfigured.run(*words, env=NO_CONFIG).partition(" --")[0]

    words = launcher_cache.words(Config())
    assert words is not None
    for word in words:
        assert create(f'{{"env":"{word}"}}') == "python runtime", word
        assert create(f'{{"env":"{word[:-1]}"}}') == "runc create", word
