"""Hooks of enroot, run by a stand-in that follows enroot's documentation (harness/enroot.py)."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import run
from harness.driver import Driver, lines_of_nvidia_smi
from harness.enroot import UID, Enroot
from harness.installation import Installation, write_config
from harness.namespaces import HOLD, held

SMI = ("nvidia-smi", "-L")
ASK = "NVIDIA_VISIBLE_DEVICES"
SITES = "ENROOT_GPUHOOK_DEVICES"
NVIDIAS = "98-nvidia.sh"
# NVIDIA's own hook calls this command, and writes it in this way.
CONFIGURE = (
    "nvidia-container-cli --user configure --no-cgroups --ldconfig=@/sbin/ldconfig "
    '--device=1 --compute --utility --require="cuda>=9.0" "${ENROOT_ROOTFS}"'
)


@pytest.fixture(scope="module")
def hooks(workspace: Path, installation: Installation) -> Iterator[Path]:
    """A hook folder with a stand-in for NVIDIA's hook and with gpuhook's installed hook."""
    prefix = workspace / "enroot-system"
    folder = prefix / "etc/enroot/hooks.d"
    folder.mkdir(parents=True)
    (folder / NVIDIAS).write_text("#!/bin/sh\necho NVIDIA's hook was run >&2\nexit 1\n")
    (folder / NVIDIAS).chmod(0o755)
    words = [f"--prefix={prefix}", f"--state-dir={prefix}/state"]
    program = f"--runtime-path={installation.runtime}"
    run([installation.command, "install", "--engine=enroot", *words, program]).ok()
    yield folder
    run([installation.command, "uninstall", "--engine=enroot", *words]).ok()
    assert (folder / NVIDIAS).read_text().endswith("exit 1\n")
    assert os.listdir(folder) == [NVIDIAS]


@pytest.fixture(params=["restricted", "host's /dev", "host's /dev as root"])
def restricted(request: pytest.FixtureRequest) -> dict[str, str]:
    if request.param == "restricted":
        return {"ENROOT_RESTRICT_DEV": "y"}
    return {"ENROOT_REMAP_ROOT": "y"} if request.param.endswith("as root") else {}


@pytest.fixture
def enroot(
    tmp_path: Path, workspace: Path, roots: dict[str, Path], driver: Driver, hooks: Path
) -> Iterator[Enroot]:
    place = workspace / f"enroot-{tmp_path.name}"
    root = place / "root"
    shutil.copytree(roots["debian"], root, symlinks=True)
    for path in (root, *root.rglob("*")):
        os.chown(path, UID, UID, follow_symlinks=False)
    config = write_config(place / "etc", driver.root, ["runc"])
    env = {"GPUHOOK_CONFIG": str(config), "HOST_DEV": str(driver.root / "dev")}
    with held(["unshare", "--mount", "--propagation=private", "sh", "-c", HOLD]) as namespace:
        yield Enroot(namespace, root, place / "work", (hooks,), env)
    shutil.rmtree(place)


def test_the_images_environment_selects_gpus(
    enroot: Enroot, driver: Driver, restricted: dict[str, str]
) -> None:
    """With the host's whole /dev, enroot's default, a choice doesn't exclude other GPUs."""
    done = enroot.start(*SMI, image=f"{ASK}=all\n{ASK}=1,2\n", **restricted).ok()
    seen = driver.chosen(1, 2) if "ENROOT_RESTRICT_DEV" in restricted else driver.gpus
    assert done.stdout.splitlines() == lines_of_nvidia_smi(seen)


def test_a_restricted_dev_has_only_the_requested_nodes(enroot: Enroot, driver: Driver) -> None:
    done = enroot.start("sh", "-c", "ls /dev", image=f"{ASK}=1\n", ENROOT_RESTRICT_DEV="y").ok()
    assert set(done.stdout.split()) == {"null", "nvidiactl", f"nvidia{driver.gpus[1].minor}"}


def test_the_callers_environment_overrides_the_images(enroot: Enroot, driver: Driver) -> None:
    done = enroot.start(*SMI, image=f"{ASK}=all\n", ENROOT_RESTRICT_DEV="y", **{ASK: "3"}).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(3))


@pytest.mark.parametrize("image", ["", f"{ASK}=void\n", "CUDA_VERSION=11.0\n"])
def test_a_container_without_a_request_gets_no_driver(enroot: Enroot, image: str) -> None:
    done = enroot.start("sh", "-c", "! command -v nvidia-smi", image=image).ok()
    assert done.stderr == ""


def test_request_none_gives_the_driver_without_gpus(enroot: Enroot) -> None:
    image = f"{ASK}=none\n"
    done = enroot.start("sh", "-c", "command -v nvidia-smi && ls /dev", image=image,
                        ENROOT_RESTRICT_DEV="y").ok()  # fmt: skip
    assert set(done.stdout.split()) == {"/usr/bin/nvidia-smi", "null", "nvidiactl"}


def test_utility_is_the_default_capability(enroot: Enroot) -> None:
    find = ("sh", "-c", "ls /usr/lib/*-linux-gnu/libcuda.so.1 || :")
    assert enroot.start(*find, image=f"{ASK}=0\n").ok().stdout == ""
    image = f"{ASK}=0\nNVIDIA_DRIVER_CAPABILITIES=compute\n"
    assert "libcuda.so.1" in enroot.start(*find, image=image).ok().stdout


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (f"{ASK}=99\n", "99"),
        (f"{ASK}=0\nNVIDIA_REQUIRE_CUDA=cuda>=99.0\n", "requires"),
    ],
)
def test_an_unsatisfiable_request_ends_the_start(enroot: Enroot, image: str, message: str) -> None:
    done = enroot.start("true", image=image).failed()
    assert message in done.stderr
    image += "NVIDIA_DISABLE_REQUIRE=true\n"
    assert (enroot.start("true", image=image).status == 0) == (message == "requires")


def test_an_unknown_capability_is_a_warning(enroot: Enroot) -> None:
    image = f"{ASK}=0\nNVIDIA_DRIVER_CAPABILITIES=nonsense\n"
    done = enroot.start("nvidia-smi", "-L", image=image).ok()
    assert "GPU 0" in done.stdout
    assert "'nonsense' isn't a driver capability" in done.stderr


def test_a_site_may_take_the_schedulers_variable(enroot: Enroot, driver: Driver) -> None:
    source = {"site": f"{SITES} CUDA_VISIBLE_DEVICES\n", "ENROOT_RESTRICT_DEV": "y"}
    done = enroot.start(*SMI, image=f"{ASK}=all\n", **source, CUDA_VISIBLE_DEVICES="2,5").ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(2, 5))
    done = enroot.start("sh", "-c", "ls /dev", image=f"{ASK}=all\n", **source).ok()
    assert done.stdout.split() == ["null"]


@pytest.mark.parametrize("name", ["x[$(touch {mark})]", "A-B", "1", "ä", "A B"])
def test_an_invalid_variable_name_is_refused(enroot: Enroot, tmp_path: Path, name: str) -> None:
    """bash would run a command that such a name contains."""
    word = name.format(mark=tmp_path / "mark")
    done = enroot.start("true", image=f"{ASK}=all\n", site=f"{SITES} {word}\n").failed()
    assert "neither slurm nor the name of a variable" in done.stderr
    assert not (tmp_path / "mark").exists()


def test_slurm_setting_is_refused_if_slurm_does_not_confine_devices(enroot: Enroot) -> None:
    done = enroot.start("true", image=f"{ASK}=all\n", site=f"{SITES} slurm\n").failed()
    assert "cgroup.conf" in done.stderr


def test_no_program_is_run_in_the_container(enroot: Enroot) -> None:
    """The hook must not run ldconfig, for example, which fails in a container in a container."""
    for name in ("ldconfig", "ldconfig.real"):
        program = enroot.root / "sbin" / name
        program.unlink(missing_ok=True)
        program.write_text("#!/bin/sh\ntouch /was-run\n")
        program.chmod(0o755)
    enroot.start(*SMI, image=f"{ASK}=0\n").ok()
    assert not (enroot.root / "was-run").exists()


def test_nvidias_enroot_hook_works_with_gpuhook_container_cli(
    enroot: Enroot, driver: Driver, installation: Installation, restricted: dict[str, str]
) -> None:
    place = enroot.work.parent / "nvidia"
    (place / "bin").mkdir(parents=True)
    (place / "bin/nvidia-container-cli").symlink_to(installation.bin / "gpuhook-container-cli")
    hook = place / NVIDIAS
    hook.write_text(f'#!/bin/bash\nset -euo pipefail\nPATH="{place}/bin:$PATH"\n{CONFIGURE}\n')
    hook.chmod(0o755)
    theirs = Enroot(enroot.namespace, enroot.root, enroot.work, (place,), enroot.env)
    done = theirs.start(*SMI, **restricted).ok()
    seen = driver.chosen(1) if "ENROOT_RESTRICT_DEV" in restricted else driver.gpus
    assert done.stdout.splitlines() == lines_of_nvidia_smi(seen)
