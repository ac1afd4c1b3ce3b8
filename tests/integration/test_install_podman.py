"""gpuhook install and uninstall for podman: as a runtime, and as a hook without our runtime."""

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.commands import Result, run, wait_until
from harness.driver import Driver, lines_of_nvidia_smi
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation
from harness.namespaces import Namespace
from harness.podman import Podman, podman
from harness.snapshot import contents

DEBIAN = image("debian")
TWO = ["NVIDIA_VISIBLE_DEVICES=0,2"]
TIME = re.compile(r'time="[^"]*"')
REFUSED = "These containers are running"
BOUND = "gpuhook-bound"  # a container that keeps running in a test
CONTAINERS = Path("/etc/containers")  # the test session has an /etc of its own


@pytest.fixture(scope="module")
def storage(workspace: Path, host: Namespace, archive: Path) -> Iterator[Podman]:
    with podman(workspace / "install-podman", host, Path("/usr/sbin/runc"), archive) as engine:
        yield engine


@pytest.fixture(scope="module")
def crun_storage(workspace: Path, v1: Namespace, archive: Path) -> Iterator[Podman]:
    with podman(workspace / "install-podman-crun", v1, Path("/usr/bin/crun"), archive) as engine:
        yield engine


@pytest.fixture(params=["storage", "crun_storage"])
def engine(request: pytest.FixtureRequest) -> Podman:
    """podman with runc and with crun, without our runtime."""
    found: Podman = request.getfixturevalue(request.param)
    return found


class Installer:
    """A function that calls gpuhook for podman, with its state in a separate folder."""

    def __init__(self, command: Path, config: Path, state: Path) -> None:
        self._command = command
        self._env = {"GPUHOOK_CONFIG": str(config)}
        self._state = state

    def __call__(self, verb: str, *words: str) -> Result:
        options = ["--engine=podman", f"--state-dir={self._state}"]
        done: list[Result] = []

        def is_settled() -> bool:
            done.append(run([self._command, verb, *options, *words], env=self._env))
            return REFUSED not in done[-1].stderr or BOUND in done[-1].stderr

        # podman run --rm returns before the container's conmon exits.
        # The name of that container is one that podman chooses.
        wait_until(is_settled, "no container of the test's is left")
        return done[-1]


@pytest.fixture
def gpuhook(installation: Installation, podman_config: Path, tmp_path: Path) -> Iterator[Installer]:
    """The gpuhook command; everything that a test installs is removed at its end."""
    before = contents(CONTAINERS)
    installer = Installer(installation.command, podman_config, tmp_path / "state")
    yield installer
    installer("uninstall").ok()
    assert contents(CONTAINERS) == before
    assert not (tmp_path / "state").exists()


def test_the_runtime_can_be_named_after_install_and_not_after_uninstall(
    gpuhook: Installer, storage: Podman, driver: Driver
) -> None:
    named = dataclasses.replace(storage, runtime=Path("gpu-py"))
    named.run(DEBIAN, "true").failed()
    gpuhook("install").ok()
    inside = seen(named.run(DEBIAN, *look(driver.minors), env=TWO))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}
    gpuhook("uninstall").ok()
    named.run(DEBIAN, "true").failed()


def test_containers_that_need_the_runtime_are_named(
    gpuhook: Installer, storage: Podman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "storage.conf"
    folders = f'graphroot = "{storage.folder}/root"\nrunroot = "{storage.folder}/run"\n'
    conf.write_text(f'[storage]\ndriver = "overlay"\n{folders}')
    gpuhook("install").ok()
    named = dataclasses.replace(storage, runtime=Path("gpu-py"))
    for engine, name in ((named, "bound"), (storage, "free")):
        engine.call("create", "--network=none", f"--name={name}", DEBIAN).ok()
    try:
        with monkeypatch.context() as patch:
            patch.setenv("CONTAINERS_STORAGE_CONF", str(conf))
            done = gpuhook("uninstall", "--dry-run").ok()
    finally:
        named.call("rm", "--force", "bound", "free").ok()
    assert "bound" in done.stderr
    assert "free" not in done.stderr


def test_uninstall_unless_in_use_is_refused_while_a_container_needs_it(
    gpuhook: Installer, storage: Podman, installation: Installation
) -> None:
    gpuhook("install").ok()
    words = ["run", "--detach", "--network=none", "--pids-limit=-1"]
    words += ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
    bound = dataclasses.replace(storage, runtime=installation.runtime)
    try:
        for engine, name in ((bound, BOUND), (storage, "free")):
            engine.call(*words, f"--name={name}", DEBIAN, "sleep", "1000").ok()
        done = gpuhook("uninstall", "--unless-in-use").failed()
        assert f"Run this first: podman stop {BOUND}." in done.stderr
        done = gpuhook("uninstall").failed()
        assert f"Run this first: podman stop {BOUND}; or continue with" in done.stderr
        gpuhook("uninstall", "--force").ok()
        assert "nothing to remove" in gpuhook("uninstall").ok().stdout
        gpuhook("install").ok()
        bound.call("stop", "--time=0", BOUND).ok()
        # conmon may take a moment to exit.
        wait_until(lambda: gpuhook("uninstall", "--unless-in-use").status == 0, "it is in no use")
    finally:
        storage.call("rm", "--force", "--time=0", BOUND, "free").ok()


def test_errors_reach_the_user(gpuhook: Installer, storage: Podman) -> None:
    """podman passes --log only to runtimes in its list, which now contains gpu-py."""
    gpuhook("install").ok()
    named = dataclasses.replace(storage, runtime=Path("gpu-py"))
    done = named.run(DEBIAN, "true", env=["NVIDIA_VISIBLE_DEVICES=99"]).failed()
    assert "This host has no GPU or MIG device '99'" in done.stderr


@pytest.mark.parametrize("own", ["", "runc"])
def test_gpu_py_calls_podmans_own_runtime(
    gpuhook: Installer, crun_storage: Podman, podman_config: Path, tmp_path: Path, own: str
) -> None:
    """This is crun with podman's default, or else the runtime that containers.conf names."""
    config = tmp_path / "config.toml"
    config.write_text(re.sub(r"runtimes = .*\n", "", podman_config.read_text()))
    mine = CONTAINERS / "containers.conf"
    before = mine.read_bytes() if mine.exists() else None
    usual = dataclasses.replace(crun_storage, runtime=None)
    try:
        if own:
            mine.write_text(f'[engine]\nruntime = "{own}"\n')
        podmans = usual.call("info", "--format={{.Host.OCIRuntime.Path}}").ok().stdout.strip()
        with using(podman_config, config):
            gpuhook("install").ok()
            named = dataclasses.replace(crun_storage, runtime=Path("gpu-py"))
            done = named.run(DEBIAN, "sleep", "1000", options=["--detach", "--name=which"]).ok()
            kept = {"crun": "status", "runc": "state.json"}[Path(podmans).name]
            crun_storage.namespace.run(
                "test", "-f", f"/run/{Path(podmans).name}/{done.stdout.strip()}/{kept}"
            ).ok()
    finally:
        crun_storage.call("rm", "--force", "--time=0", "which").ok()
        mine.unlink(missing_ok=True)
        if before is not None:
            mine.write_bytes(before)


def test_default_runtime_gives_the_requested_gpus(
    gpuhook: Installer, storage: Podman, driver: Driver
) -> None:
    gpuhook("install", "--set-default").ok()
    default = dataclasses.replace(storage, runtime=None)
    done = default.run(DEBIAN, "nvidia-smi", "-L", env=TWO).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))


def test_installing_again_loses_nothing(
    gpuhook: Installer, storage: Podman, driver: Driver
) -> None:
    """podman before 5.0 reads our hook file only because the drop-in names its folder."""
    gpuhook("install", "--set-default", "--hook=precreate").ok()
    installed = contents(CONTAINERS)
    done = gpuhook("install").ok()
    assert contents(CONTAINERS) == installed
    assert "podman: unchanged /etc/containers/containers.conf.d/99-gpuhook.conf" in done.stdout
    gpus = lines_of_nvidia_smi(driver.chosen(0, 2))
    default = dataclasses.replace(storage, runtime=None)
    for engine in (default, storage):  # by the runtime, and by only the hook
        assert engine.run(DEBIAN, "nvidia-smi", "-L", env=TWO).ok().stdout.splitlines() == gpus
    gpuhook("install", "--hook=none").ok()
    assert seen(storage.run(DEBIAN, *look(), env=TWO)).nodes == {}
    assert default.run(DEBIAN, "nvidia-smi", "-L", env=TWO).ok().stdout.splitlines() == gpus
    gpuhook("install", "--no-set-default").ok()
    named = dataclasses.replace(storage, runtime=Path("gpu-py"))
    assert named.run(DEBIAN, "nvidia-smi", "-L", env=TWO).ok().stdout.splitlines() == gpus


@pytest.mark.parametrize("stage", ["prestart", "precreate"])
def test_the_hook_gives_gpus_without_the_runtime(
    gpuhook: Installer, engine: Podman, driver: Driver, stage: str
) -> None:
    gpuhook("install", f"--hook={stage}").ok()
    inside = seen(engine.run(DEBIAN, *look(driver.minors), env=TWO))
    minors = {gpu.minor for gpu in driver.chosen(0, 2)}
    assert inside.gpu_minors == minors
    assert {minor for minor, opened in inside.by_hand.items() if opened == "ENXIO"} == minors
    gpuhook("uninstall").ok()
    assert seen(engine.run(DEBIAN, *look(), env=TWO)).nodes == {}


def test_precreate_writes_the_device_rules(
    gpuhook: Installer, engine: Podman, driver: Driver
) -> None:
    """Rules in config.json outlive podman update and systemctl daemon-reload."""
    gpuhook("install", "--hook=precreate").ok()
    create = ["--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
    create += ["--pids-limit=-1", "--env", TWO[0]]
    name = engine.call("create", *create, DEBIAN, "sleep", "1000").ok().stdout.strip()
    try:
        engine.call("start", name).ok()
        for verb in (["exec", name], ["restart", "--time=0", name], ["exec", name]):
            words = ["nvidia-smi", "-L"] if verb[0] == "exec" else []
            done = engine.call(*verb, *words).ok()
        assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))
        path = engine.call("inspect", "--format={{.OCIConfigPath}}", name).ok().stdout.strip()
        config = engine.namespace.run("cat", path).ok().stdout
    finally:
        engine.call("rm", "--force", "--time=0", name).ok()
    minors = [gpu.minor for gpu in driver.chosen(0, 2)]
    for minor in minors:
        assert f'"major":195,"minor":{minor}' in config.replace(" ", "").replace("\n", "")
    assert "gpuhook-prestart" in config


@pytest.mark.parametrize("stage", ["prestart", "precreate"])
def test_hook_leaves_other_containers_alone(gpuhook: Installer, engine: Podman, stage: str) -> None:
    script = "busybox find /dev /etc /usr/lib | sort; busybox env | sort"
    before = engine.run(DEBIAN, "sh", "-c", script, options=["--hostname=one"]).ok()
    gpuhook("install", f"--hook={stage}").ok()
    after = engine.run(DEBIAN, "sh", "-c", script, options=["--hostname=one"]).ok()
    assert after.stdout == before.stdout
    assert TIME.sub("", after.stderr) == TIME.sub("", before.stderr)


@pytest.mark.parametrize("stage", ["prestart", "precreate"])
def test_builds_work_with_the_hook_installed(
    gpuhook: Installer, storage: Podman, tmp_path: Path, stage: str
) -> None:
    """Builds also read hooks, but they don't know the stage precreate."""
    (tmp_path / "Dockerfile").write_text(f"FROM {DEBIAN}\nRUN true\n")
    gpuhook("install", f"--hook={stage}").ok()
    words = ["--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
    storage.call("build", *words, "--no-cache", "--tag=localhost/built:hook", tmp_path).ok()
    storage.call("rmi", "localhost/built:hook").ok()


@pytest.mark.parametrize("stage", ["prestart", "precreate"])
def test_the_hook_refuses_an_unknown_device(gpuhook: Installer, engine: Podman, stage: str) -> None:
    gpuhook("install", f"--hook={stage}").ok()
    done = engine.run(DEBIAN, "true", env=["NVIDIA_VISIBLE_DEVICES=99"]).failed()
    if engine.shows_errors_of_hooks and stage == "prestart":
        assert "This host has no GPU or MIG device '99'" in done.stderr


@pytest.mark.parametrize("way", [["--set-default"], ["--hook=prestart"], ["--hook=precreate"]])
def test_a_refusal_is_recorded_for_later_diagnosis(
    installation: Installation,
    gpuhook: Installer,
    engine: Podman,
    driver: Driver,
    podman_config: Path,
    tmp_path: Path,
    way: list[str],
) -> None:
    """podman prints no output of a hook at precreate, and crun prints no output of any hook."""
    config = tmp_path / "config.toml"
    text = podman_config.read_text().replace("[gpuhook]", f'debug = "{tmp_path}/debug"\n[gpuhook]')
    config.write_text(re.sub(r"state-dir = .*", f'state-dir = "{tmp_path}/kept"', text))
    with using(podman_config, config):
        gpuhook("install", *way).ok()
        used = dataclasses.replace(engine, runtime=None) if way == ["--set-default"] else engine
        used.run(DEBIAN, "true", env=["NVIDIA_VISIBLE_DEVICES=99"]).failed()
        doctor = run([installation.command, "doctor", "--config", config, "--format=json"])
    sentence = "This host has no GPU or MIG device '99'"
    for kept in (tmp_path / "kept/errors.log", tmp_path / "debug"):
        [record] = [json.loads(line) for line in kept.read_text().splitlines()]
        assert record["level"] == "error"
        assert sentence in record["msg"]
    found = {each["check"]: each["message"] for each in json.loads(doctor.stdout)["findings"]}
    assert sentence in found["recent-errors"]


@contextmanager
def using(link: Path, config: Path) -> Iterator[None]:
    """Use this configuration as the default one until the end of the block."""
    before = link.readlink()
    link.unlink()
    link.symlink_to(config)
    try:
        yield
    finally:
        link.unlink()
        link.symlink_to(before)


def test_runtime_and_hook_together_work_once(
    gpuhook: Installer, storage: Podman, driver: Driver
) -> None:
    gpuhook("install", "--set-default", "--hook=prestart").ok()
    default = dataclasses.replace(storage, runtime=None)
    inside = seen(default.run(DEBIAN, *look(driver.minors), env=TWO))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}


def test_gpus_of_podman_4_is_ignored(podman_runtime: Podman, driver: Driver) -> None:
    """podman 4 accepts Docker's option for compatibility; later ones request a CDI device."""
    version = run(["podman", "--version"]).ok().stdout.split()[-1]
    done = podman_runtime.run(DEBIAN, *look(driver.minors), options=["--gpus=all"])
    if int(version.partition(".")[0]) < 5:
        assert not seen(done).gpu_minors
    else:
        assert "nvidia.com/gpu=all" in done.failed().stderr
