"""Content of a container, which is the same for each way to request its GPUs.

Mode hook is the reference for the other ways. Each necessary difference is listed here with
its reason.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import bundles
from harness.bundles import Bundle
from harness.cdi import KERNEL, KIND, generate, read_by_engines, write_kernel
from harness.commands import path_of
from harness.content import FOLDER, FOLDERS, LIST, Content, listed, of_bundle, unexplained
from harness.driver import Driver, in_kernel
from harness.engines import settings
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.podman import Podman, podman

ASK = ("NVIDIA_VISIBLE_DEVICES=0,2", "NVIDIA_DRIVER_CAPABILITIES=all")
NAMES = (f"{KIND}=0", f"{KIND}=2")
BY_NAME = f"NVIDIA_VISIBLE_DEVICES={','.join(NAMES)}"
SETTINGS = """
mode = "{mode}"
[nvidia-container-runtime.modes.cdi]
spec-dirs = ["{folder}"]
"""
Start = Callable[..., Content]


@pytest.fixture(params=FOLDERS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def start(
    workspace: Path,
    roots: dict[str, Path],
    host: Namespace,
    installation: Installation,
    driver: Driver,
    kind: str,
    tmp_path: Path,
) -> Start:
    """A function that starts a container on a fresh root.

    It returns the content in addition to that of a container without GPUs.
    """
    numbers = iter(range(9))

    def content(runtime: str | Path, mode: str, env: tuple[str, ...]) -> Content:
        more = SETTINGS.format(mode=mode, folder=tmp_path / "cdi")
        config = write_config(tmp_path / f"{next(numbers)}", driver.root, ["runc"], more)
        with bundles.bundle(workspace / "bundles", roots[kind], host, "runc") as made:
            return of_bundle(made, runtime, driver, config, env)

    base = content("runc", "hook", ())

    def start(mode: str, *env: str) -> Content:
        return content(installation.runtime, mode, env).beyond(base)

    return start


@pytest.fixture
def reference(start: Start) -> Content:
    """Content of a container in mode hook that asks for GPUs by id and for all capabilities."""
    made = start("hook", *ASK)
    assert (len(made.nodes), len(made.files) > 50, len(made.rows) > 20) == (10, True, True), made
    assert {"/proc/driver/nvidia/params", "/etc/vulkan/icd.d/nvidia_icd.json"} < {*made.digests}
    assert len([path for path in made.digests if path.endswith("/information")]) == 2
    return made


@pytest.fixture
def documents(
    installation: Installation, configs: dict[str, Path], driver: Driver, tmp_path: Path
) -> tuple[Path, Path]:
    """Two CDI specs: gpuhook's, and one that lets containers see the driver in /proc."""
    made = generate(installation, configs["runc"], tmp_path / "cdi")
    return made, write_kernel(driver, made.parent)


def test_cdi_names_give_the_same_container_as_mode_hook(start: Start, reference: Content) -> None:
    found = reference.differences(start("hook", BY_NAME, ASK[1]))
    assert {*found} == {("variables", "NVIDIA_VISIBLE_DEVICES")}


def test_cdi_specs_give_the_same_container_as_mode_hook(
    start: Start, reference: Content, documents: tuple[Path, Path], kind: str
) -> None:
    assert unexplained(reference, start("cdi", BY_NAME), kind) == {}


@pytest.fixture
def closed(installation: Installation, tmp_path: Path) -> dict[str, Path]:
    """Programs by name, each called with umask 077, as hardened hosts set for all programs."""
    made = {}
    for name, program in (("runc", "runc"), ("gpu-py", installation.runtime)):
        made[name] = tmp_path / f"closed-{name}"
        made[name].write_text(f'#!/bin/sh\numask 077\nexec {program} "$@"\n')
        made[name].chmod(0o755)
    return made


WAYS = {
    "helper": ("hook", "", ASK),
    "hook": ("hook", "helper = false\n", ASK),
    "spec": ("spec", "", ASK),
    "cdi": ("cdi", "", (BY_NAME, ASK[1])),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_engines_umask_does_not_change_the_container(
    way: str,
    workspace: Path,
    roots: dict[str, Path],
    host: Namespace,
    installation: Installation,
    driver: Driver,
    kind: str,
    documents: tuple[Path, Path],
    closed: dict[str, Path],
    tmp_path: Path,
) -> None:
    mode, more, env = WAYS[way]
    settings = SETTINGS.format(mode=mode, folder=tmp_path / "cdi")
    config = write_config(tmp_path / "config", driver.root, ["runc"], settings)
    config.write_text(config.read_text().replace("[gpuhook]\n", f"[gpuhook]\n{more}"))

    def content(runtime: str | Path, *env: str) -> Content:
        with bundles.bundle(workspace / "bundles", roots[kind], host, "runc") as made:
            return of_bundle(made, runtime, driver, config, env)

    first = content(closed["gpu-py"], *env).beyond(content(closed["runc"]))
    second = content(installation.runtime, *env).beyond(content("runc"))
    assert len(first.nodes) == 10
    assert first.differences(second) == {}


@pytest.fixture(scope="module")
def engine(workspace: Path, archive: Path, driver: Driver) -> Iterator[Podman]:
    """A podman that calls runc, on a host with the driver in /proc."""
    runc = path_of("runc")
    with (
        in_kernel(driver) as entered,
        podman(workspace / "podman-same", entered, runc, archive) as made,
    ):
        yield made


def test_cdi_specs_read_by_an_engine_give_the_same_container_as_mode_hook(
    engine: Podman, reference: Content, documents: tuple[Path, Path], kind: str
) -> None:
    with read_by_engines(*documents):
        base = listed(engine.run(image(kind), *LIST, options=[f"--device={KERNEL}"]))
        options = settings("--device", [KERNEL, *NAMES])
        made = listed(engine.run(image(kind), *LIST, options=options))
    assert unexplained(reference, made.beyond(base), kind) == {}


def test_mode_spec_gives_the_same_container_as_mode_hook(
    start: Start,
    reference: Content,
    workspace: Path,
    roots: dict[str, Path],
    host: Namespace,
    installation: Installation,
    driver: Driver,
    kind: str,
    tmp_path: Path,
) -> None:
    made = start("spec", *ASK)
    config = write_config(tmp_path / "explain", driver.root, ["runc"], 'mode = "spec"')
    with bundles.bundle(workspace / "bundles", roots[kind], host, "runc") as bundle:
        bundle.environ(*ASK)
        undone = explained(bundle, installation, config, driver)
    kinds = {"bind", "symlink", "ldcache", "write", "proc-driver"}  # for sockets, not permanent
    assert {step["kind"] for step in undone} == kinds
    expected = without(linked_by_mounts(reference), undone)
    assert expected.differences(without(made, undone)) == {}


def explained(
    bundle: Bundle, installation: Installation, config: Path, driver: Driver
) -> list[dict[str, str]]:
    """Return the operations that gpuhook explain reports as skipped."""
    options = (f"--config={config}", f"--bundle={bundle.path}", "--format=json")
    with in_kernel(driver) as entered:
        answer = json.loads(entered.run(installation.command, "explain", *options).ok().stdout)
    undone: list[dict[str, str]] = answer["undone"]
    return undone


def linked_by_mounts(content: Content) -> Content:
    """Return content with each link to a mounted file replaced by a mount of that file."""
    files, mounts = dict(content.files), dict(content.mounts)
    for path in content.files:
        place = path
        while content.files.get(place, "").startswith("symbolic link"):
            place = os.path.normpath(f"{os.path.dirname(place)}/{content.files[place].split()[-1]}")
        if place != path and place in content.mounts:
            files[path], mounts[path] = content.files[place], content.mounts[place]
    return Content(content.nodes, files, mounts, content.digests, content.rows, content.variables)


def without(content: Content, undone: list[dict[str, str]]) -> Content:
    """Return content without the results of skipped steps, and without folders left empty."""
    kinds = {step["kind"] for step in undone}
    places = tuple(step["destination"] for step in undone if "destination" in step)
    files, mounts, digests = (
        {path: what for path, what in part.items() if not path.startswith(places)}
        for part in (content.files, content.mounts, content.digests)
    )
    for path in sorted(files, reverse=True):
        others = {*files, *content.nodes} - {path}
        if files[path] == FOLDER and not any(each.startswith(f"{path}/") for each in others):
            del files[path]
    rows = {} if "ldcache" in kinds else content.rows
    return Content(content.nodes, files, mounts, digests, rows, content.variables)
