"""A container stays with the low-level runtime that made it, whatever is configured meanwhile."""

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launchers import FUNCTIONS, Installed

from gpuhook.ground.oci.runtime_argv import Arguments
from gpuhook.runtime_shim import find_maker
from gpuhook.standby import launcher_files

VERBS = ("create", "run", "start", "delete", "state", "exec", "kill", "restore", "list", "what")
KEPT = {"crun": "status", "runc": "state.json"}
ABOUT = [
    "state ID", "delete --force ID", "exec --process /p --detach --pid-file /f ID",
    "exec ID sh -c true", "kill ID 9", "update --resources - ID",
    "--log /l --log-format json state ID",
]  # fmt: skip
NOT_ABOUT = ["list", "state OTHER", "features", "spec", "state .", "state ..", "state x/ID"]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """A launcher that has both low-level runtimes."""
    made = Installed(tmp_path)
    made.runtime("crun")
    monkeypatch.setattr(launcher_files, "FOLDER", str(made.saved))
    return made


def keep(root: Path, name: str, identity: str = "ID") -> None:
    (root / identity).mkdir(parents=True)
    (root / identity / KEPT[name]).touch()


@pytest.mark.parametrize("maker", KEPT)
@pytest.mark.parametrize("runtimes", [["runc", "crun"], ["crun", "runc"], ["runc"], ["crun"]])
def test_who_made_a_container_goes_on_with_it(
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
def test_where_a_user_has_containers_without_root(kept: Installed, maker: str) -> None:
    [other] = [name for name in KEPT if name != maker]
    kept.configure(f'[nvidia-container-runtime]\nruntimes = ["{other}", "{maker}"]')
    keep(kept.folder / "user" / maker, maker)
    env = {"XDG_RUNTIME_DIR": str(kept.folder / "user")}
    assert kept.run("delete", "ID", env=env) == f"{maker} delete ID"
    assert kept.run("delete", "ID") == f"{other} delete ID"


def test_other_runtimes_keep_what_looks_like_runcs(kept: Installed) -> None:
    kept.runtime("youki")
    kept.configure('[nvidia-container-runtime]\nruntimes = ["youki", "runc"]')
    keep(kept.folder / "root", "runc")
    assert kept.run("--root", str(kept.folder / "root"), "state", "ID").startswith("youki ")


def test_where_its_maker_is_gone_python_says_so(kept: Installed) -> None:
    script = kept.bin / "gpu-py"
    usual = ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:"
    text = script.read_text().replace(usual, ":")  # the machine has it
    kept.program(script, text)
    (kept.path / "crun").unlink()
    kept.configure('[nvidia-container-runtime]\nruntimes = ["runc"]')
    keep(kept.folder / "root", "crun")
    words = ("--root", str(kept.folder / "root"), "state", "ID")
    assert kept.run(*words, env={"PATH": str(kept.path)}) == "python runtime"


words = st.lists(st.sampled_from(("ID", "crun", "-f", ".", "..", "a/ID", "", "OTHER")), max_size=4)


@settings(max_examples=60)
@given(words, st.sampled_from(VERBS), st.booleans())
def test_script_finds_the_maker_that_python_finds(
    tmp_path_factory: pytest.TempPathFactory, rest: list[str], verb: str, rooted: bool
) -> None:
    folder = tmp_path_factory.mktemp("maker")
    keep(folder / "root", "crun", "crun")
    keep(folder / "root", "runc")
    keep(folder / "user/crun", "crun")
    argv = [*(["--root", str(folder / "root")] if rooted else []), verb, *rest]
    script = (
        FUNCTIONS + '\ngp_made=\'\'\nread_arguments "$@"\nprintf "%s %s" "$gp_verb" "$gp_made"\n'
    )
    user = str(folder / "user")
    done = subprocess.run(
        ["sh", "-c", script, "sh", *argv], capture_output=True, check=True, text=True,
        env={"XDG_RUNTIME_DIR": user},
    )  # fmt: skip
    said, _, made = done.stdout.partition(" ")
    if said == "pass":
        assert made == find_maker(Arguments(argv), user)
    else:
        assert made == ""
