"""runtime_argv: the meaning of runc's and crun's command lines."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.names import CREATING_VERBS
from gpuhook.base.oci.runtime_argv import Arguments

DOCKER = (
    "--root /var/run/docker/runtime-runc/moby --log /b/log.json --log-format json "
    "create --bundle /b --pid-file /b/init.pid ID"
)


@pytest.mark.parametrize(
    ("line", "verb", "bundle"),
    [
        (DOCKER, "create", "/b"),
        ("create --bundle=/b id", "create", "/b"),
        ("create -b /b id", "create", "/b"),
        ("create --bundle /a --bundle /b id", "create", "/b"),
        ("create id", "create", None),
        ("run --detach -b /b id", "run", "/b"),
        ("--debug=false --systemd-cgroup create --no-pivot=true --bundle /b id", "create", "/b"),
        ("--debug --systemd-cgroup create --bundle /b create", "create", "/b"),
        ("--root create start id", "start", None),
        ("--log=create state create", "state", None),
        ("--cgroup-manager systemd delete --force create", "delete", None),
        ("exec --process /p create", "exec", None),
        ("kill create 9", "kill", None),
        ("restore --bundle /b id", "restore", None),
    ],
)
def test_verb_and_bundle_are_found(line: str, verb: str, bundle: str | None) -> None:
    arguments = Arguments(line.split())
    assert (arguments.verb, arguments.bundle, arguments.unclear) == (verb, bundle, "")


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("", ""),
        ("--config other.json", "other.json"),
        ("--config=/b/config.json", "/b/config.json"),
        ("-f ./config.json", "./config.json"),
        ("-f config.json", ""),
        ("--config x --config config.json", ""),
    ],
)
def test_another_config_file_is_found(words: str, config: str) -> None:
    """crun uses the named file, or the bundle's for config.json; runc refuses the option."""
    arguments = Arguments(f"create -b /b {words} id".split())
    assert (arguments.verb, arguments.bundle, arguments.config) == ("create", "/b", config)
    assert arguments.unclear == ""


@pytest.mark.parametrize(
    "line",
    [
        "", "--version", "-v", "--what", "--future state id", "-root /r state id", "creat id",
        "create", "create --bundle", "create --bundle /b", "create --bundle /b one two", "--root",
        "run --pid-file /p", "create --help", "run --bundle /b -h id", "create --usage", "-?",
        "-V create id", "-v run id", "--root create",
    ],
)  # fmt: skip
def test_command_lines_that_create_no_container_pass_to_the_runtime(line: str) -> None:
    arguments = Arguments(line.split())
    assert arguments.verb not in CREATING_VERBS
    assert arguments.unclear == ""


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("create -b=/b id", "-b=/b"),
        ("create -b/b id", "-b/b"),
        ("create -bundle /b id", "-bundle"),
        ("create --bun /b id", "--bun"),
        ("create id --bundle /b", "--bundle"),
        ("create -f=other.json id", "-f=other.json"),
        ("create -fother.json id", "-fother.json"),
        ("create --conf other.json id", "--conf"),
        ("create --pid-file --bundle id", "--pid-file"),
        ("create --bundle= id", "--bundle="),
        ("create -- id", "--"),
        ("run -dbb1 id", "-dbb1"),
        ("--bundle /b create id", "--bundle"),
        ("--future x create -b /b id", "--future"),
        ("-root /r create -b /b id", "-root"),
        ("--future exec id create", "--future"),
    ],
)
def test_arguments_that_runtimes_read_differently_are_unclear(line: str, word: str) -> None:
    arguments = Arguments(line.split())
    assert arguments.unclear == word
    assert arguments.verb not in CREATING_VERBS


@pytest.mark.parametrize(
    ("log", "file"),
    [
        ("/l", "/l"), ("l", "l"), ("/l:m", "/l:m"), ("file:/l", None), ("journald:id", None),
        ("syslog:id", None),
    ],
)  # fmt: skip
def test_the_last_log_file_is_found(log: str, file: str | None) -> None:
    assert Arguments(["--log", log, "create", "id"]).log == file
    assert Arguments(["--log=/x", f"--log={log}", "create", "--what", "id"]).log == file


WORDS = ["create", "run", "state", "--", "-b", "--bundle", "--bundle=/b", "--log", "-", "--help"]


@given(st.lists(st.text() | st.sampled_from(WORDS)))
def test_any_command_line_is_classified(argv: list[str]) -> None:
    arguments = Arguments(argv)
    assert arguments.verb in ("", *argv)
    assert not (arguments.unclear and arguments.verb)
    if not CREATING_VERBS.intersection(argv):
        assert not arguments.unclear
        assert arguments.verb not in CREATING_VERBS


VECTORS = json.loads((Path(__file__).parents[3] / "vectors" / "oci.json").read_text())["vectors"]
# `--log create list` lists containers; NVIDIA's runtime wrongly sees a create there.
# `run` creates a container, too. No runtime accepts a bundle option before the verb.
DIFFERENT = {"--log create list", "run --bundle /b c", "--bundle create create"}


def cases(group: str) -> list[dict[str, Any]]:
    return [case for case in VECTORS if case["group"].startswith(group)]


@pytest.mark.parametrize("case", cases("oci.bundle"), ids=lambda case: str(case["name"]))
def test_bundle_arguments_match_the_shared_cases(case: dict[str, Any]) -> None:
    argv = case["input"]["argv"]
    arguments = Arguments([*argv, "ID"])
    if argv[:1] == ["create"]:
        assert (arguments.verb, arguments.bundle or "") == ("create", case["expected"]["bundle"])
    else:
        assert arguments.verb not in CREATING_VERBS


@pytest.mark.parametrize("case", cases("oci.is_create"), ids=lambda case: str(case["name"]))
def test_create_commands_match_the_shared_cases(case: dict[str, Any]) -> None:
    if case["name"] not in DIFFERENT:
        assert (Arguments(case["input"]["argv"]).verb == "create") == case["expected"]["create"]


def test_command_lines_with_known_differences_from_the_shared_vectors() -> None:
    assert Arguments(["--log", "create", "list"]).verb == "list"
    assert Arguments(["run", "--bundle", "/b", "c"]).verb == "run"
    assert Arguments(["--bundle", "create", "create"]).unclear == "--bundle"
