"""Apptainer's two options for NVIDIA's GPUs in a container, with a simulated driver.

Apptainer does the work for ``--nv`` itself; ``--nvccli`` calls nvidia-container-cli, which
gpuhook provides.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import Result
from harness.driven import HOME, USER, driven
from harness.driver import Driver, lines_of_nvidia_smi
from harness.inside import look, seen
from harness.installation import Installation
from harness.releases import Release

PAGE = Path(__file__).parents[2] / "docs/engines/apptainer.md"
# The host's root may lack a capability, and Apptainer gives a container all of them or none.
AS_ROOT = ("exec", "--no-privs")
SMI = ("nvidia-smi", "-L")

SET_UP = """
rm -f /etc/localtime && echo UTC >/etc/localtime
echo joe:100000:65536 | tee /etc/subuid >/etc/subgid
apptainer build --sandbox /srv/box IMAGE
apptainer build /srv/box.sif /srv/box
cp -a /srv/box HOME/box
chown -R joe:joe HOME/box
chmod -R u+w HOME/box
"""


@pytest.fixture(scope="module")
def host(
    apptainer_root: Path,
    workspace: Path,
    installation: Installation,
    driver: Driver,
    roots: dict[str, Path],
) -> Iterator[Release]:
    """A host with Apptainer, NVIDIA's driver, and an image as a folder and as a file."""
    words = (apptainer_root, workspace, installation, driver, SET_UP)
    with driven("apptainer", *words, IMAGE=roots["debian"]) as made:
        yield made


def apptainer(
    host: Release, *words: str, visible: str | None = "0,2", user: tuple[str, ...] = ()
) -> Result:
    """Run Apptainer with the value that NVIDIA_VISIBLE_DEVICES is to have in the container."""
    env = {} if visible is None else {"NVIDIA_VISIBLE_DEVICES": visible}
    return host.namespace.run(*user, "apptainer", *words, env=env)


@pytest.mark.parametrize("user", [(), USER], ids=["root", "user"])
def test_nv_gives_all_gpus(host: Release, driver: Driver, user: tuple[str, ...]) -> None:
    """Apptainer finds libraries and nodes without gpuhook, and offers no choice of GPUs."""
    words = ("--nv", "--contain", "/srv/box")
    done = apptainer(host, *(("exec",) if user else AS_ROOT), *words, *SMI, user=user).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.gpus)


@pytest.mark.parametrize("options", [(), ("--pid",), ("--ipc",)], ids=["", "pid", "ipc"])
@pytest.mark.parametrize("image", ["/srv/box", "/srv/box.sif"], ids=["folder", "sif"])
def test_nvccli_gives_the_named_gpus(
    host: Release, driver: Driver, image: str, options: tuple[str, ...]
) -> None:
    words = (*AS_ROOT, "--nvccli", "--contain", *options, image)
    done = apptainer(host, *words, *SMI).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))
    inside = seen(apptainer(host, *words, *look(libraries=["libcuda.so.1"])))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}
    assert inside.libraries["libcuda.so.1"][0].endswith(driver.version)
    uuid = driver.gpus[5].uuid
    done = apptainer(host, *words, *SMI, visible=uuid).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi([driver.gpus[5]])


@pytest.mark.parametrize("option", ["--userns", "--fakeroot"])
def test_nvccli_gives_the_named_gpus_in_a_user_namespace(
    host: Release, driver: Driver, option: str
) -> None:
    """The image belongs to the user."""
    words = ("exec", option, "--nvccli", "--contain", f"{HOME}/box")
    done = apptainer(host, *words, *SMI, user=USER).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))
    inside = seen(apptainer(host, *words, *look(), user=USER))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}


def test_nvccli_without_contain_gives_all_gpus(host: Release, driver: Driver) -> None:
    """The container then has the host's /dev; Apptainer asks for all GPUs by default."""
    for visible in ("0,2", None):
        done = apptainer(host, *AS_ROOT, "--nvccli", "/srv/box", *SMI, visible=visible).ok()
        assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.gpus)
    assert "NVIDIA_VISIBLE_DEVICES=all" in done.stderr


def test_the_capabilities_of_the_documentation_give_graphics_libraries(
    host: Release, driver: Driver
) -> None:
    """Apptainer accepts only capabilities from its list, which lacks "all"."""
    (named,) = re.findall(r"NVIDIA_DRIVER_CAPABILITIES=(\S+)", PAGE.read_text())
    env = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": named}
    words = (*AS_ROOT, "--nvccli", "--contain", "/srv/box", *look(libraries=["libEGL_nvidia.so.0"]))
    inside = seen(host.namespace.run("apptainer", *words, env=env))
    assert inside.libraries["libEGL_nvidia.so.0"][0].endswith(driver.version)


def test_a_host_folder_bound_over_the_driver_folder_is_refused(
    host: Release, driver: Driver
) -> None:
    folder = f"{HOME}/shared"
    host.namespace.run("mkdir", "-p", folder).ok()
    bound = f"{folder}:{driver.library('libcuda.so.1').parent.relative_to(driver.root)}"
    words = (*AS_ROOT, "--nvccli", "--contain", "--bind", bound.replace(":", ":/"), "/srv/box")
    done = apptainer(host, *words, "true").failed()
    assert "in a volume" in done.stderr
    assert host.namespace.run("ls", "-A", folder).ok().stdout == ""
