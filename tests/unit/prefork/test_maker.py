"""The low-level runtime of a container, which stays the same whatever is configured later."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launchers import Builds, Installed, Probe

from gpuhook.base.oci.runtime_argv import Arguments
from gpuhook.runtime_shim import find_maker

VERBS = ("create", "run", "start", "delete", "state", "exec", "kill", "restore", "list", "what")
KEPT = {"crun": "status", "runc": "state.json"}
ABOUT = [
    "state ID", "delete --force ID", "exec --process /p --detach --pid-file /f ID",
    "exec ID sh -c true", "kill ID 9", "update --resources - ID",
    "--log /l --log-format json state ID",
]  # fmt: skip
NOT_ABOUT = ["list", "state OTHER", "features", "spec", "state .", "state ..", "state x/ID"]


@pytest.fixture
def kept(installed: Installed) -> Installed:
    """A launcher that has both low-level runtimes."""
    installed.runtime("crun")
    return installed


def keep(root: Path, name: str, identity: str = "ID") -> None:
    (root / identity).mkdir(parents=True)
    (root / identity / KEPT[name]).touch()


@pytest.mark.parametrize("maker", KEPT)
@pytest.mark.parametrize("runtimes", [["runc", "crun"], ["crun", "runc"], ["runc"], ["crun"]])
def test_a_container_stays_with_the_runtime_that_created_it(
    kept: Installed, maker: str, runtimes: list[str]
) -> None:
    kept.configure(f"[nvidia-container-runtime]\nruntimes = {json.dumps(runtimes)}")
    root = kept.folder / "root"
    keep(root, maker)
    [other] = [name for name in KEPT if name != maker]
    keep(root, other, "other")
    first = runtimes[0]
    for option in (["--root", str(root)], [f"--root={root}"]):
        for line in ABOUT:
            assert kept.run(*option, *line.split()).split()[0] == maker, line
            elsewhere = kept.run("--root", "/nowhere", *line.split())
            assert elsewhere.split()[0] == first
        for line in NOT_ABOUT:
            assert kept.run(*option, *line.split()).split()[0] == first, line


@pytest.mark.parametrize("maker", KEPT)
def test_a_rootless_container_stays_with_its_low_level_runtime(kept: Installed, maker: str) -> None:
    [other] = [name for name in KEPT if name != maker]
    kept.configure(f'[nvidia-container-runtime]\nruntimes = ["{other}", "{maker}"]')
    keep(kept.folder / "user" / maker, maker)
    env = {"XDG_RUNTIME_DIR": str(kept.folder / "user")}
    assert kept.run("delete", "ID", env=env) == f"{maker} delete ID"
    assert kept.run("delete", "ID") == f"{other} delete ID"


def test_a_runc_state_file_does_not_override_another_runtime(kept: Installed) -> None:
    kept.runtime("youki")
    kept.configure('[nvidia-container-runtime]\nruntimes = ["youki", "runc"]')
    keep(kept.folder / "root", "runc")
    assert kept.run("--root", str(kept.folder / "root"), "state", "ID").startswith("youki ")


def test_a_container_whose_runtime_is_missing_is_passed_to_python(
    kept: Installed, builds: Builds
) -> None:
    kept.install(builds.bare)  # the host may have crun; this build doesn't search for it there
    (kept.path / "crun").unlink()
    kept.configure('[nvidia-container-runtime]\nruntimes = ["runc"]')
    keep(kept.folder / "root", "crun")
    words = ("--root", str(kept.folder / "root"), "state", "ID")
    assert kept.run(*words, env={"PATH": str(kept.path)}) == "python runtime"


# Folders of containers and their runtimes; then, for each command line, the runtime that made its
# container.
PLACES = "root/ID:runc", "root/crun:crun", "user/crun/other:crun", "user/runc/mine:runc"
MAKERS = {
    "--root {}/root state ID": "runc",
    "--root={}/root state ID": "runc",
    "--root {}/root exec --detach crun sh": "crun",
    "--root {}/root state other": "",
    "--root {}/root state nowhere ID": "runc",
    "--root {}/root state ../root/ID": "",
    "--root {}/root state .": "",
    "--root {}/root state -ID": "",
    "state other": "crun",
    "state mine": "runc",
    "delete --force mine": "runc",
    "state ID": "",
    "list": "",
}


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory, probe: Probe) -> Path:
    """A folder of containers, with a user's own folder for containers in it."""
    folder = tmp_path_factory.mktemp("maker")
    for place in PLACES:
        path, _, name = place.partition(":")
        keep((folder / path).parent, name, path.rpartition("/")[2])
    probe.set_runtime_dir(str(folder / "user"))
    return folder


@pytest.mark.parametrize(("line", "maker"), MAKERS.items())
def test_launcher_and_python_find_the_same_creating_runtime(
    user: Path, probe: Probe, line: str, maker: str
) -> None:
    argv = line.format(user).split()
    assert probe.arguments(argv)[3] == maker
    assert find_maker(Arguments(argv), str(user / "user")) == maker


words = st.lists(
    st.sampled_from(("ID", "crun", "-f", ".", "..", "a/ID", "", "other", "mine", "x" * 300)),
    max_size=4,
)


@settings(max_examples=200)
@given(rest=words, verb=st.sampled_from(VERBS), rooted=st.booleans())
def test_any_command_line_yields_the_same_creating_runtime(
    user: Path, probe: Probe, rest: list[str], verb: str, rooted: bool
) -> None:
    argv = [*(["--root", str(user / "root")] if rooted else []), verb, *rest]
    said, _, _, made = probe.arguments(argv)
    if said == "pass":
        assert made == find_maker(Arguments(argv), str(user / "user"))
    else:
        assert made == ""
