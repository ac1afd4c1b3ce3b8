"""runtime_argv: what runc's and crun's command lines mean to us."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.runtime_argv import Arguments

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
    assert Arguments(["create", "-f", "other.json", "id"]).config == "other.json"
    assert Arguments(["create", "--config=other.json", "id"]).config == "other.json"


@given(st.lists(st.text() | st.sampled_from(["create", "--", "-b", "--bundle", "--log", "-"])))
def test_no_command_line_crashes(argv: list[str]) -> None:
    arguments = Arguments(argv)
    assert arguments.verb in ("", *argv)


VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "oci.json").read_text())["vectors"]
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
