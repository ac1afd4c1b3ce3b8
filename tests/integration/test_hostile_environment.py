"""Protection of our programs from an image's environment and from files where Python searches."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from harness.bundles import Bundle, GpuBundle
from harness.commands import run
from harness.driver import Driver
from harness.hostile import change_image, refused
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.prefork import RUNTIMES

EVIL = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void attack(void) {
    if (access("%(guard)s", F_OK) == 0) close(open("%(mark)s", O_CREAT | O_WRONLY, 0644));
}
"""


def evil_image(bundle: Bundle, tmp_path: Path) -> tuple[list[str], Path]:
    """Put files that attack the loader into a root; return the environment and the mark.

    The attack creates the mark only on the host, because it needs a guard that the container
    doesn't see.
    """
    guard, mark = tmp_path / "guard", tmp_path / "mark"
    guard.touch()
    source, library = tmp_path / "evil.c", tmp_path / "evil.so"
    source.write_text(EVIL % {"guard": guard, "mark": mark})
    run(["gcc", "-shared", "-fPIC", "-o", library, source]).ok()
    script = tmp_path / "evil.py"
    script.write_text(f"open({str(mark)!r}, 'w')\n")
    change_image(bundle, f"mkdir python; cp {library} evil.so")
    for module in ("os", "sitecustomize", "usercustomize", "encodings", "site", "re", "ctypes"):
        change_image(bundle, f"cp {script} {module}.py")
    change_image(bundle, f"cp {script} python/re.py")
    here = "/proc/self/cwd"
    return [
        f"LD_PRELOAD={here}/evil.so",
        f"LD_AUDIT={here}/evil.so",
        f"LD_LIBRARY_PATH={here}",
        f"PYTHONPATH={here}:{here}/python",
        f"PYTHONHOME={here}",
        f"PYTHONSTARTUP={here}/os.py",
        "PYTHONINSPECT=1",
        f"GCONV_PATH={here}",
        f"TMPDIR={here}",
        f"GPUHOOK_CONFIG={here}/config.toml",
        "NVIDIA_VISIBLE_DEVICES=0",
    ], mark


@pytest.mark.parametrize("stage", ["prestart", "createRuntime"])
@RUNTIMES
def test_the_images_environment_reaches_no_hook(
    bundle: GpuBundle, tmp_path: Path, stage: str
) -> None:
    settings, mark = evil_image(bundle, tmp_path)
    bundle.environ(*settings)
    if stage != "prestart":
        bundle.by_hook(stage=stage)
    bundle.start()
    assert not mark.exists()


def runc_version() -> tuple[int, ...]:
    found = re.match(r"runc version (\d+)\.(\d+)", run(["runc", "--version"]).ok().stdout)
    assert found is not None
    return tuple(map(int, found.groups()))


@RUNTIMES
def test_a_hook_without_its_own_environment_would_be_compromised(
    bundle: GpuBundle, tmp_path: Path
) -> None:
    """Our hooks' ``env`` protects them from these variables; this hook has no ``env``.

    For such a hook, runc before 1.3 uses the container's environment (CVE-2025-23266). crun
    doesn't.
    """
    settings, mark = evil_image(bundle, tmp_path)
    bundle.environ(*settings)
    careless = {"path": "/bin/sh", "args": ["sh", "-c", "cat >/dev/null"]}
    bundle.change(lambda spec: spec.update(hooks={"createContainer": [careless]}))
    bundle.run(bundle.runtime, bundle.env)
    assert mark.exists() == (bundle.runtime == "runc" and runc_version() < (1, 3))


@pytest.mark.protects(
    "isolated",
    "the launcher runs Python isolated from the caller's environment and working folder",
    instead='char isolated[] = "-B";',
    only="python_settings and runc-host",
)
@RUNTIMES
def test_python_settings_and_the_working_folder_are_ignored(
    bundle: GpuBundle, installation: Installation, tmp_path: Path
) -> None:
    """The launcher itself protects Python, even if a hook's ``env`` isn't ours."""
    settings, mark = evil_image(bundle, tmp_path)
    env = dict(setting.split("=", 1) for setting in settings if not setting.startswith("LD_"))
    env.pop("GPUHOOK_CONFIG")
    options = ("--config", str(bundle.settings))
    result = bundle.call(installation.hook, *options, env=env, cwd=bundle.root)
    assert "container state" in refused(result)
    assert not mark.exists()
    bundle.call("python3", "-c", "import re", env={"PYTHONPATH": "python"}, cwd=bundle.root)
    assert mark.exists(), "without isolation the image's modules are not imported either"


def spoil(folder: Path, mark: Path) -> None:
    """Put modules with the names of all of Python's and gpuhook's modules into a folder.

    Each writes its name into a file when it is imported.
    """
    (folder / "gpuhook").mkdir()
    for name in (*sys.stdlib_module_names, "pynvml", "gpuhook/__init__", "gpuhook/_start"):
        (folder / f"{name}.py").write_text(f"print(__name__, file=open({str(mark)!r}, 'a'))\n")


def with_the_package_elsewhere(installation: Installation, folder: Path) -> Installation:
    """Return an installation like that of pip --editable, where Python itself finds the package."""
    run([installation.bin / "python3", "-m", "venv", "--without-pip", folder]).ok()
    [packages] = installation.bin.parent.glob("lib/python3*/site-packages")
    [own] = folder.glob("lib/python3*/site-packages")
    (own / "gpuhook.pth").write_text(f"{packages}\n")
    for launcher in (installation.runtime, installation.hook):
        shutil.copy(launcher, folder / "bin")
    return Installation(folder / "bin")


@pytest.mark.protects(
    "isolated",
    "gpu-py imports nothing from its working folder",
    instead='char isolated[] = "-B";',
    only="working_folder and beside",
)
@pytest.mark.protects(
    "isolated",
    "gpu-py imports nothing from its working folder if Python itself finds the package",
    instead='char isolated[] = "-B";',
    only="working_folder and elsewhere",
)
@pytest.mark.protects(
    "own-module-folder",
    "gpu-py looks for modules in its own folder, not in the working folder",
    instead='<the statement>\n"sys.path.insert(0, \\"\\")\\n"',
    only="working_folder and beside",
)
@pytest.mark.protects(
    "module-path-end",
    "gpu-py's module path ends with its own folder, not with the working folder",
    instead='"sys.path.insert(0, \\"\\")\\n"',
    only="working_folder and beside",
)
@pytest.mark.parametrize("package", ["beside the launcher", "elsewhere"])
@RUNTIMES
def test_gpu_py_imports_nothing_from_its_working_folder(
    bundle: Bundle, installation: Installation, driver: Driver, tmp_path: Path, package: str
) -> None:
    """Engines call gpu-py in the bundle's folder.

    Nothing is saved yet, so gpu-py imports all the modules that it ever imports.
    """
    mark = tmp_path / "imported"
    spoil(bundle.path, mark)
    used = installation
    if package == "elsewhere":
        used = with_the_package_elsewhere(installation, tmp_path / "venv")
    config = write_config(tmp_path / "config", driver.root, [bundle.runtime])
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0,2")
    bundle.command(*look())
    result = bundle.call(
        used.runtime, "run", bundle.name, env={"GPUHOOK_CONFIG": str(config)}, cwd=bundle.path
    )
    assert not mark.exists(), mark.read_text()
    assert seen(result).gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}
