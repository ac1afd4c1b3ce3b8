"""Containers in user namespaces that have a device in addition to the GPU.

For these containers, crun calls hooks with the bundle "/". It has entered the container's
mount namespace to make the device's node, and uses its working directory as the bundle.
"""

import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import bundles, podman
from harness.bundles import GpuBundle, bundle
from harness.commands import Result, path_of
from harness.driver import Driver, lines_of_nvidia_smi
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.namespaces import Namespace, allow_user_range
from harness.podman import Podman, hooks_dir
from harness.prefork import Site
from harness.snapshot import nothing_left

FUSE = os.stat("/dev/fuse").st_rdev
CHECK = 'test -c /dev/fuse && exec "$@"'
MAPPING = [{"containerID": 0, "hostID": 100_000, "size": 65536}]
LOST = "The low-level runtime gave the hook no bundle but /"


def into_user_namespace(spec: bundles.Spec) -> None:
    """Put the container into a user namespace, and give it one more device."""
    linux = spec["linux"]
    linux["namespaces"].append({"type": "user"})
    linux.update(uidMappings=MAPPING, gidMappings=MAPPING)
    numbers = {"type": "c", "major": os.major(FUSE), "minor": os.minor(FUSE)}
    linux["devices"] = [{"path": "/dev/fuse", "fileMode": 0o666, **numbers}]
    linux["resources"]["devices"].append({"allow": True, "access": "rwm", **numbers})


def prepared(made: GpuBundle, driver: Driver) -> GpuBundle:
    made.namespace.run("chown", "100000:100000", made.root).ok()
    made.change(into_user_namespace)
    made.environ("NVIDIA_VISIBLE_DEVICES=0,2")
    made.command("sh", "-c", CHECK, "sh", *look(driver.minors))
    return made


@pytest.fixture
def mapped(bundle: GpuBundle, driver: Driver) -> GpuBundle:
    """A bundle whose container is in a user namespace, has a device, and looks at its GPUs."""
    return prepared(bundle, driver)


@pytest.fixture
def config(bundle: GpuBundle, driver: Driver) -> Path:
    """A configuration for this bundle, with a state folder for errors."""
    made = write_config(bundle.path / "etc", driver.root, [bundle.runtime])
    (made.parent / "state").mkdir()
    return made


def configure(config: Path, *lines: str) -> None:
    text = config.read_text()
    config.write_text(text.replace("[gpuhook]", "\n".join(["[gpuhook]", *lines])))


def errors(config: Path) -> str:
    """Return the message that a hook has logged, which crun doesn't print."""
    [line] = (config.parent / "state/errors.log").read_text().splitlines()
    found: str = json.loads(line)["msg"]
    return found


def assert_sees_its_gpus(done: Result, driver: Driver) -> None:
    """Assert that a container has GPUs 0 and 2.

    No nodes can be made in a user namespace, so only existing nodes are opened.
    """
    inside = seen(done)
    given = {gpu.minor for gpu in driver.chosen(0, 2)}
    assert inside.gpu_minors == given
    assert {f"/dev/nvidia{minor}" for minor in given} <= set(inside.nodes)
    assert {opened for opened, _ in inside.nodes.values()} == {"ENXIO"}


@pytest.mark.parametrize("named", [True, False], ids=["bundle named", "working directory"])
@pytest.mark.parametrize(
    "lines",
    [["helper = true"], ["helper = false"], ['mode = "spec"', 'exclusive = ["nvidia.com/gpu"]']],
    ids=["helper", "hook", "lease"],
)
def test_gpu_py_gives_gpus_in_a_user_namespace(
    mapped: GpuBundle, driver: Driver, config: Path, lines: list[str], named: bool
) -> None:
    configure(config, *lines)
    words = ["--bundle", str(mapped.path)] if named else []
    env = {"GPUHOOK_CONFIG": str(config)}
    with nothing_left(driver.root, pid=mapped.namespace.pid):
        done = mapped.call(mapped.gpu_py, "run", *words, mapped.name, env=env)
    assert_sees_its_gpus(done, driver)


def test_the_prefork_server_gives_gpus_in_a_user_namespace(site: Site) -> None:
    site.stand()
    mapped = site.bundle
    assert isinstance(mapped, GpuBundle)
    mapped.config.write_bytes(site.plain)
    site.plain = prepared(mapped, site.driver).config.read_bytes()
    assert_sees_its_gpus(site.run(), site.driver)
    assert site.served


@pytest.mark.parametrize("stage", ["prestart", "createRuntime"])
def test_an_engine_hook_gives_gpus_in_a_user_namespace(
    mapped: GpuBundle, driver: Driver, config: Path, stage: str
) -> None:
    """As with engines, the command line of the low-level runtime names the bundle."""
    mapped.by_hook(config, stage)
    with nothing_left(driver.root, pid=mapped.namespace.pid):
        assert_sees_its_gpus(mapped.run(mapped.runtime), driver)


def test_a_hook_that_cannot_find_its_bundle_fails_until_it_is_configured(
    mapped: GpuBundle, driver: Driver, config: Path
) -> None:
    mapped.by_hook(config)
    if mapped.runtime == "runc":  # with runc, the hook can find its bundle
        assert_sees_its_gpus(mapped.call(mapped.runtime, "run", mapped.name), driver)
        return
    with nothing_left(driver.root, mapped.path / "upper", pid=mapped.namespace.pid):
        mapped.call(mapped.runtime, "run", mapped.name).failed()
    assert errors(config).startswith(f"gpuhook-prestart: {LOST}")
    hook = mapped.spec()["hooks"]["prestart"][0]
    named = [*hook["args"], "--bundle", str(mapped.path)]  # as the error suggests
    mapped.change(lambda spec: spec.update(hooks={"prestart": [{**hook, "args": named}]}))
    assert_sees_its_gpus(mapped.call(mapped.runtime, "run", mapped.name), driver)


def test_a_hook_never_takes_another_containers_bundle(
    mapped: GpuBundle, driver: Driver, config: Path, workspace: Path, roots: dict[str, Path]
) -> None:
    """The hook's arguments name another bundle: the hook fails or uses its own container's."""
    mapped.by_hook(config)
    lower = (workspace / "bundles", roots["debian"], mapped.namespace, mapped.runtime)
    with bundle(*lower) as other:
        other.environ("NVIDIA_VISIBLE_DEVICES=1")
        hook = mapped.spec()["hooks"]["prestart"][0]
        args = [hook["args"][0], "--bundle", str(other.path), *hook["args"][1:]]
        mapped.change(lambda spec: spec.update(hooks={"prestart": [{**hook, "args": args}]}))
        done = mapped.run(mapped.runtime)
        if mapped.runtime == "runc":
            assert_sees_its_gpus(done, driver)
        else:
            done.failed()
            sentence = f"{other.config} has another root than the container, {mapped.root}"
            assert errors(config).startswith(f"gpuhook-prestart: {sentence}")


def of_gpu_py(installation: Installation, config: Path, folder: Path) -> tuple[Path, None]:
    program = folder / "gpu-py"
    words = shlex.join(["exec", str(installation.runtime)])
    program.write_text(f'#!/bin/sh\nexport GPUHOOK_CONFIG={config}\n{words} "$@"\n')
    program.chmod(0o755)
    return program, None


def of_hook(installation: Installation, config: Path, folder: Path) -> tuple[Path, Path]:
    args = (installation.hook, "--config", str(config))
    return path_of("crun"), hooks_dir(folder / "hooks", *args, "prestart")


def of_precreate(installation: Installation, config: Path, folder: Path) -> tuple[Path, Path]:
    args = (installation.hook, "--config", str(config))
    return path_of("crun"), hooks_dir(folder / "hooks", *args, "precreate", stage="precreate")


@pytest.fixture(scope="module", params=[of_gpu_py, of_hook, of_precreate])
def one(
    request: pytest.FixtureRequest,
    workspace: Path,
    v1: Namespace,
    installation: Installation,
    archive: Path,
    driver: Driver,
) -> Iterator[Podman]:
    """A podman that calls crun, through gpu-py or with one of our hooks."""
    arrange: Callable[[Installation, Path, Path], tuple[Path, Path | None]] = request.param
    place = workspace / f"userns-{arrange.__name__}"
    place.mkdir()
    config = write_config(place / "etc", driver.root, ["crun"])
    runtime, hooks = arrange(installation, config, place)
    with podman.podman(place / "p", v1, runtime, archive, hooks=hooks) as engine:
        yield engine


@pytest.mark.parametrize(
    "options", [["--userns=auto:size=4096"], ["--uidmap=0:100000:65536", "--gidmap=0:100000:65536"]]
)
def test_podman_gives_gpus_in_a_user_namespace(
    one: Podman, driver: Driver, options: list[str]
) -> None:
    allow_user_range("containers", 2_000_000, 1_000_000)
    words = ["sh", "-c", CHECK, "sh", "nvidia-smi", "-L"]
    with nothing_left(driver.root, pid=one.pid):
        done = one.run(
            image("debian"),
            *words,
            env=["NVIDIA_VISIBLE_DEVICES=0,2"],
            options=["--device=/dev/fuse", *options],
        )
    assert done.ok().stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))
