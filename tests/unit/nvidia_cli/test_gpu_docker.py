"""Command lines of gpu-docker, as pure data and as a stand-in for docker receives them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.nvidia_cli.gpu_docker import command_line
from gpuhook.tools.engines.docker_gpus import variables

GPU = "--runtime=gpu-py"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run IMAGE", f"run {GPU} IMAGE"),
        ("create --rm IMAGE", f"create {GPU} --rm IMAGE"),
        ("container run IMAGE", f"container run {GPU} IMAGE"),
        ("container create IMAGE", f"container create {GPU} IMAGE"),
        ("-D -H tcp://run run IMAGE run", f"-D -H tcp://run run {GPU} IMAGE run"),
        ("--context run run IMAGE", f"--context run run {GPU} IMAGE"),
        ("--context=run run IMAGE", f"--context=run run {GPU} IMAGE"),
        ("--context run ps", "--context run ps"),
        ("-c run ps", "-c run ps"),
        ("-crun run IMAGE", f"-crun run {GPU} IMAGE"),
        ("-c=run run IMAGE", f"-c=run run {GPU} IMAGE"),
        ("-Dc run run IMAGE", f"-Dc run run {GPU} IMAGE"),
        ("-l debug --tls run IMAGE", f"-l debug --tls run {GPU} IMAGE"),
        ("exec run create", "exec run create"),
        ("compose run web", "compose run web"),
        ("network create run", "network create run"),
        ("container ls run", "container ls run"),
        ("image run", "image run"),
        ("-- run", "-- run"),
        ("--help", "--help"),
        ("--host", "--host"),
        ("", ""),
        ("container", "container"),
    ],
)
def test_only_run_and_create_get_the_runtime(words: str, expected: str) -> None:
    assert command_line(words.split(), {}) == ["docker", *expected.split()]


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [
        ("0", "0"),
        ("0,2", "0,2"),
        ("0 2", "0,2"),
        ("0, 2 ", "0,2"),
        ("GPU-1234 1:0\tMIG-5", "GPU-1234,1:0,MIG-5"),
        ("all", "all"),
    ],
)
def test_nv_gpu_takes_blanks_and_commas(gpus: str, devices: str) -> None:
    argv = command_line(["run", "IMAGE"], {"NV_GPU": gpus})
    assert argv == ["docker", "run", GPU, "-e", f"NVIDIA_VISIBLE_DEVICES={devices}", "IMAGE"]


@pytest.mark.parametrize("gpus", ["", " ", ","])
def test_an_empty_nv_gpu_adds_no_variable(gpus: str) -> None:
    assert command_line(["run", "IMAGE"], {"NV_GPU": gpus}) == ["docker", "run", GPU, "IMAGE"]


def test_nv_gpu_changes_no_other_command() -> None:
    assert command_line(["ps", "-a"], {"NV_GPU": "0"}) == ["docker", "ps", "-a"]


@pytest.mark.parametrize(
    ("setting", "docker"),
    [
        ("sudo docker -D", ["sudo", "docker", "-D"]),
        ("'/opt/my docker/docker'", ["/opt/my docker/docker"]),
        ("", ["docker"]),
    ],
)
def test_nv_docker_sets_the_docker_command(setting: str, docker: list[str]) -> None:
    assert command_line(["ps"], {"NV_DOCKER": setting}) == [*docker, "ps"]


@given(st.lists(st.text()))
def test_no_word_is_ever_changed_or_lost(words: list[str]) -> None:
    argv = command_line(words, {})
    assert [word for word in argv[1:] if word != GPU] == [word for word in words if word != GPU]


@pytest.fixture
def fake_docker(tmp_path: Path) -> Path:
    """A program that records the bytes of its arguments."""
    program = tmp_path / "docker"
    program.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" >{tmp_path}/argv\nexit 42\n')
    program.chmod(0o755)
    return program


def _gpu_docker(*words: bytes, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable.encode(), b"-m", b"gpuhook.nvidia_cli.gpu_docker", *words],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        check=False,
    )


def test_special_bytes_in_arguments_are_passed_unchanged(tmp_path: Path, fake_docker: Path) -> None:
    odd = [b"two words", b"", b"'\"$HOME`id`\\", b"\xff\xfe", b"a\nb", "\u00e9".encode()]
    done = _gpu_docker(b"run", *odd, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 42
    argv = (tmp_path / "argv").read_bytes().split(b"\0")[:-1]
    assert argv == [b"run", GPU.encode(), *odd]
    assert fake_docker.exists()


def test_gpu_dockers_version_precedes_dockers(fake_docker: Path) -> None:
    done = _gpu_docker(b"version", NV_DOCKER=str(fake_docker))
    assert done.stdout.startswith(b"gpu-docker: ")
    assert _gpu_docker(b"version", b"-f", b"x", NV_DOCKER=str(fake_docker)).stdout == b""


def test_debugging_prints_the_command(fake_docker: Path) -> None:
    done = _gpu_docker(b"run", b"a b", NV_DOCKER=str(fake_docker), NV_DEBUG="1")
    assert done.stderr.decode() == f"+ {fake_docker} run {GPU} 'a b'\n"


def test_a_missing_docker_is_reported_in_one_sentence() -> None:
    done = _gpu_docker(b"run", NV_DOCKER="/nonexistent/docker")
    assert done.returncode == 127
    assert done.stderr.decode().startswith("gpu-docker: /nonexistent/docker can't be started: ")


# --gpus ---------------------------------------------------------------------------------------


DEVICES = "NVIDIA_VISIBLE_DEVICES="
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES="


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("all", [f"{DEVICES}all"]),
        ("2", [f"{DEVICES}0,1"]),
        ("count=1", [f"{DEVICES}0"]),
        ("-1", [f"{DEVICES}all"]),
        ("0", [f"{DEVICES}void"]),
        ("device=0", [f"{DEVICES}0"]),
        ('"device=0,GPU-1"', [f"{DEVICES}0,GPU-1"]),
        ("device=", [DEVICES]),
        ("driver=nvidia,count=all", [f"{DEVICES}all"]),
        ("capabilities=video", [f"{DEVICES}0", f"{CAPABILITIES}video"]),
        (
            'all,"capabilities=utility,compute,gpu"',
            [f"{DEVICES}all", f"{CAPABILITIES}utility,compute"],
        ),
        ("all,capabilities=gpu", [f"{DEVICES}all"]),
        ("all,options=a", [f"{DEVICES}all"]),
    ],
)  # fmt: skip
def test_a_gpus_value_becomes_the_right_variables(value: str, expected: list[str]) -> None:
    assert variables(value) == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "takes all, a number or names"),
        ("many", "takes all or a number, not 'many'"),
        ("device=0,1", "'\"device=0,1\"'"),
        ("1,2", "count twice"),
        ("gpu=1", "has no key 'gpu'"),
        ("driver=amd", "no driver 'amd'"),
        ("capabilities=tpu", "no driver with the capability 'tpu'"),
        ('"device=0', "takes all, a number or names"),
        ("1\n2", "takes all"),
    ],
)
def test_gpus_values_that_docker_refuses_are_refused(value: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"--gpus") as caught:
        variables(value)
    assert reason in str(caught.value)
