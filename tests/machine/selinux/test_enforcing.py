"""SELinux enforcing Debian's policy and gpuhook's module: containers get GPUs without denials."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from booted import ALLOWED, BUSYBOX, GIVEN, REFUSED, REQUEST, call, restart_docker, set_config
from enforcing import CALLERS, Denials, podman_run, without_the_module
from harness.commands import Result, run, wait_until

NODES = " && ".join(
    f'[ "$(devopen /dev/nvidia{gpu})" = "/dev/nvidia{gpu} {ALLOWED}" ]' for gpu in GIVEN
)
LACKS = " && ".join(f"[ ! -e /dev/nvidia{gpu} ]" for gpu in REFUSED)
LIBRARY = "busybox cat $(busybox find /usr -name 'libcuda.so.*.*') >/dev/null"
DOMAIN = 'busybox grep -q ":$0:" /proc/self/attr/current'
CHECK = f"{NODES} && {LACKS} && {LIBRARY} && {DOMAIN}"
BY_RUNTIME = ("--runtime=gpu-py", f"--env={REQUEST}")
BY_CDI = [f"--device=nvidia.com/gpu={gpu}" for gpu in GIVEN]
CASES = [("runtime", "runc"), ("runtime", "crun"), ("precreate", "runc"), ("prestart", "crun")]


def docker_run(options: Sequence[str]) -> Result:
    """Look for the GPUs in a Docker container, which has the domain of privileged containers."""
    words = [*options, BUSYBOX, "sh", "-c", CHECK, "spc_t"]
    return run(["docker", "run", "--rm", "--network=none", *words], timeout=300.0)


def checked(*options: str, domain: str = "container_t") -> list[str]:
    """Return the words for podman that look for the GPUs in a container of a domain."""
    return [*options, BUSYBOX, "sh", "-c", CHECK, domain]


@pytest.fixture(scope="module")
def documents(docker: tuple[str], podman: tuple[str]) -> Iterator[None]:
    """CDI specs, and a Docker that reads them."""
    call("gpuhook", "install", "--engine=all", "--cdi")
    restart_docker("docker")
    yield
    call("gpuhook", "uninstall", "--engine", "docker")


@pytest.fixture(autouse=True)
def quiet(installed: None, denials: Denials) -> None:
    """Discard earlier denials, so that only the test's denials count."""
    denials.read()


def test_selinux_is_enforcing_with_gpuhooks_policy_module(installed: None) -> None:
    assert call("getenforce") == "Enforcing\n"
    assert "gpuhook" in call("semodule", "--list-modules").split()
    labels = call("stat", "--format=%C", "/usr/bin/gpu-py", "/run/gpuhook").splitlines()
    assert [label.split(":")[2] for label in labels] == [
        "container_engine_exec_t",
        "container_runtime_t",
    ]


def test_docker_containers_start_without_selinux_denials(
    docker: tuple[str], denials: Denials
) -> None:
    for _ in range(2):  # the prefork server serves the second container
        docker_run(BY_RUNTIME).ok()
    assert denials.unusual() == []


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("way", CASES, indirect=True, scope="module", ids="-".join)
def test_podman_containers_start_without_selinux_denials(
    way: tuple[str, str], caller: str, denials: Denials
) -> None:
    name, runtime = way
    options = BY_RUNTIME if name == "runtime" else (f"--runtime={runtime}", f"--env={REQUEST}")
    podman_run(caller, checked(*options)).ok()
    assert denials.unusual() == []


def test_cdi_specs_in_docker_cause_no_selinux_denials(documents: None, denials: Denials) -> None:
    docker_run(BY_CDI).ok()
    assert denials.unusual() == []


@pytest.mark.parametrize("caller", CALLERS)
def test_cdi_specs_in_podman_cause_no_selinux_denials(
    caller: str, documents: None, denials: Denials
) -> None:
    podman_run(caller, checked(*BY_CDI)).ok()
    assert denials.unusual() == []


def test_commands_on_running_containers_cause_no_selinux_denials(
    docker: tuple[str], podman: tuple[str], denials: Denials
) -> None:
    # With Docker, the policy denies crun access to something that no container needs.
    set_config("nvidia-container-runtime.runtimes=runc,crun")
    sleeping = ("--detach", "--network=none", *BY_RUNTIME, "--name")
    call("docker", "run", *sleeping, "in-docker", BUSYBOX, "busybox", "sleep", "100000")
    try:
        # With this variable, conmon would stay in podman's unit, and would end with it.
        service = [*CALLERS["service"], "--property=UnsetEnvironment=INVOCATION_ID"]
        call(
            *service, "podman", "run", *sleeping, "in-podman", BUSYBOX, "busybox", "sleep", "100000"
        )
        listed = json.loads(call("gpuhook", "list", "--format", "json"))
        assert "in-docker" in str(listed)
        assert "in-podman" in str(listed)
        for name in ("in-docker", "in-podman"):
            assert "nothing was missing" in call("gpuhook", "repair", name)
            call("gpuhook", "explain", name)
        assert denials.unusual() == []
    finally:
        run(["docker", "rm", "--force", "in-docker"])
        run([*CALLERS["service"], "podman", "rm", "--force", "--time=0", "in-podman"])


def test_the_units_cause_no_selinux_denials(documents: None, denials: Denials) -> None:
    ask = [
        "python3",
        "-c",
        "import urllib.request as r; r.urlopen('http://127.0.0.1:9836/metrics')",
    ]
    call("systemctl", "restart", "gpuhook-watch", "gpuhook-cdi-refresh")
    try:
        call("systemctl", "start", "gpuhook-metrics")
        wait_until(lambda: run(ask).status == 0, "metrics are served")
    finally:
        call("systemctl", "stop", "gpuhook-metrics")
    assert denials.unusual() == []


def finding() -> dict[str, str]:
    """Return the doctor's finding on SELinux."""
    said = json.loads(run(["gpuhook", "doctor", "--format", "json"], timeout=120.0).stdout)
    [found] = [each for each in said["findings"] if each["check"] == "security-module"]
    return dict(found)


def test_the_doctor_reports_selinux_as_ok(documents: None, denials: Denials) -> None:
    assert finding()["status"] == "ok"
    assert denials.unusual() == []


def test_a_boolean_denies_device_nodes_to_confined_containers(
    podman: tuple[str], denials: Denials
) -> None:
    boolean = "gpuhook_containers_use_gpus"
    call("setsebool", boolean, "off")
    try:
        podman_run("service", checked(*BY_RUNTIME)).failed()
        assert {each.rule[:3] for each in denials.read()} >= {
            ("container_t", "xserver_misc_device_t", "chr_file")
        }
        assert "setsebool" in finding()["remedy"]
        unconfined = ("--security-opt=label=disable", *BY_RUNTIME)
        podman_run("service", checked(*unconfined, domain="spc_t")).ok()
    finally:
        call("setsebool", boolean, "on")


def test_without_the_policy_module_selinux_denies_container_starts(
    docker: tuple[str], podman: tuple[str], denials: Denials, debians_policy: Path
) -> None:
    """Without it podman's units can't start gpu-py, and Docker's gpu-py can't save its state."""
    with without_the_module(debians_policy):
        assert finding()["message"] == "SELinux is enforcing without gpuhook's policy module"
        denials.read()
        podman_run("service", checked(*BY_RUNTIME)).failed()
        refused = {each.rule[:3] for each in denials.read()}
        assert ("podman_conmon_t", "bin_t", "file") in refused
        docker_run(BY_RUNTIME)
        refused = {each.rule[:2] for each in denials.read()}
        assert ("dockerd_t", "initrc_runtime_t") in refused
    docker_run(BY_RUNTIME).ok()
