"""runtime_argv: what runc's and crun's command lines mean to us."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.oci.runtime_argv import Arguments

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
        ("create -b=/b id", "create", "/b"),
        ("create -b/b id", "create", "/b"),
        ("create id --bundle /b", "create", "/b"),
        ("create --pid-file --bundle id", "create", None),
        ("create --bundle /a --bundle /b id", "create", "/b"),
        ("create id", "create", None),
        ("create", "create", None),
        ("create --bundle", "create", None),
        ("create -- --bundle", "create", None),
        ("run --detach -b /b id", "run", "/b"),
        ("--debug --systemd-cgroup create --bundle /b create", "create", "/b"),
        ("--root create start id", "start", None),
        ("--log=create state create", "state", None),
        ("--cgroup-manager systemd delete --force create", "delete", None),
        ("exec --process /p create", "exec", None),
        ("kill create 9", "kill", None),
        ("--version", "", None),
        ("", "", None),
        ("restore --bundle /b id", "restore", None),
    ],
)
def test_verb_and_bundle(line: str, verb: str, bundle: str | None) -> None:
    arguments = Arguments(line.split())
    assert (arguments.verb, arguments.bundle) == (verb, bundle)


def test_log_and_config() -> None:
    assert Arguments(DOCKER.split()).log == "/b/log.json"
    assert Arguments(["--log=/l", "create", "id"]).log == "/l"
    assert Arguments(["create", "id"]).log is None


@pytest.mark.parametrize(
    ("line", "config"),
    [
        ("create -f other.json id", f"{os.getcwd()}/other.json"),
        ("create --bundle /b --config=other.json id", f"{os.getcwd()}/other.json"),
        ("create --config ./config.json -b /b id", f"{os.getcwd()}/config.json"),
        ("create -f/x/other.json id", "/x/other.json"),
        ("create -f config.json -b /b id", "config.json"),
    ],
)
def test_only_the_default_spec_is_looked_for_in_the_bundle(line: str, config: str) -> None:
    assert Arguments(line.split()).config == config


@pytest.mark.parametrize(
    ("line", "verb", "bundle"),
    [
        ("--cgroup systemd create -b /b id", "create", "/b"),
        ("--program-name state create -b /b id", "create", "/b"),
        ("create --bun /b id", "create", "/b"),
        ("create --bun=/b id", "create", "/b"),
        ("run -dbb1 id", "run", "b1"),
        ("create -bundle id", "create", "undle"),
        ("create --program-name --bundle=/b id", "create", None),
    ],
)
def test_what_only_crun_takes(line: str, verb: str, bundle: str | None) -> None:
    for crun in (True, None):
        arguments = Arguments(line.split(), crun=crun)
        assert (arguments.verb, arguments.bundle) == (verb, bundle)
        assert not arguments.ambiguous


@pytest.mark.parametrize(
    ("line", "verb", "bundle"),
    [
        ("-root /r create -bundle /b id", "create", "/b"),
        ("--debug=false create id --bundle /b", "create", "/b"),
        ("create /b id --bundle", "create", "/b"),
        ("create --bundle -- id", "create", "--"),
        ("create --pid-file --pidfd-socket /b id -b", "create", "/b"),
        ("create --no-pivot=true id -b=/b", "create", "/b"),
    ],
)
def test_what_only_runc_takes(line: str, verb: str, bundle: str | None) -> None:
    for crun in (False, None):
        arguments = Arguments(line.split(), crun=crun)
        assert (arguments.verb, arguments.bundle) == (verb, bundle)


@pytest.mark.parametrize(
    ("line", "runc", "crun"),
    [("create -b=/b id", "/b", "=/b"), ("run -bundle=/b id", "/b", "undle=/b")],
)
def test_what_each_takes_otherwise(line: str, runc: str, crun: str) -> None:
    argv = line.split()
    assert Arguments(argv).ambiguous
    assert Arguments(argv).bundle == runc
    assert Arguments(argv, crun=False).bundle == runc
    assert Arguments(argv, crun=True).bundle == crun
    assert not Arguments(argv, crun=True).ambiguous


@pytest.mark.parametrize(
    "line",
    ["create --help", "run --bundle /b -h id", "create --usage", "-V create id", "-v run id", "-?"],
)
def test_telling_of_itself_creates_nothing(line: str) -> None:
    assert Arguments(line.split()).verb == ""


@pytest.mark.parametrize(
    ("log", "file"), [("file:/l", "/l"), ("journald:id", None), ("syslog:id", None), ("/l", "/l")]
)
def test_crun_logs_elsewhere_too(log: str, file: str | None) -> None:
    assert Arguments(["--log", log, "create", "id"], crun=True).log == file
    assert Arguments(["--log", log, "create", "id"], crun=False).log == log


@given(st.lists(st.text() | st.sampled_from(["create", "--", "-b", "--bundle", "--log", "-"])))
def test_no_command_line_crashes(argv: list[str]) -> None:
    arguments = Arguments(argv)
    assert arguments.verb in ("", *argv)


VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "oci.json").read_text())["vectors"]
# `--log create list` lists containers; that NVIDIA's runtime sees a create there is a bug.
# `run` creates a container too. An option without its value is the low-level runtime's to refuse.
DIFFERENT = {"--log create list", "run --bundle /b c", "--bundle"}


def cases(group: str) -> list[dict[str, Any]]:
    return [
        case
        for case in VECTORS
        if case["group"].startswith(group) and case["name"] not in DIFFERENT
    ]


@pytest.mark.parametrize("case", cases("oci.bundle"), ids=lambda case: str(case["name"]))
def test_bundle_vectors(case: dict[str, Any]) -> None:
    assert (Arguments(case["input"]["argv"]).bundle or "") == case["expected"]["bundle"]


@pytest.mark.parametrize("case", cases("oci.is_create"), ids=lambda case: str(case["name"]))
def test_create_vectors(case: dict[str, Any]) -> None:
    assert (Arguments(case["input"]["argv"]).verb == "create") == case["expected"]["create"]


def test_where_we_differ_from_the_vectors() -> None:
    assert Arguments(["--log", "create", "list"]).verb == "list"
    assert Arguments(["run", "--bundle", "/b", "c"]).verb == "run"
    assert Arguments(["--bundle"]).bundle is None
