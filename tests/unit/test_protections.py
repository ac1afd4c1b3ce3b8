"""scripts/take-out-protections finds every protection that it is to take out."""

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts/take-out-protections"


def test_every_protection_is_found() -> None:
    loader = SourceFileLoader("take_out_protections", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # its dataclass looks itself up
    write, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = write
        del sys.modules[loader.name]
    places = [(each.name, each.file, each.code) for each in module.PROTECTIONS]
    places += [(each.name, *each.also[:2]) for each in module.PROTECTIONS if each.also]
    assert len(places) > 80
    missing = [name for name, file, code in places if code not in (REPOSITORY / file).read_text()]
    assert missing == []


def test_without_an_environment_it_says_what_is_missing(tmp_path: Path) -> None:
    """Nothing is taken out where what the tests need isn't there and can't be made."""
    (tmp_path / "scripts/lib").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    script = Path(shutil.copy(SCRIPT, tmp_path / "scripts"))
    shutil.copy(REPOSITORY / "scripts/lib/setup.sh", tmp_path / "scripts/lib")
    for name in ("python3", "flock", "apt-get"):  # no Python to make it of, no network
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("take-out-protections: what the tests need")
    assert "Traceback" not in done.stderr


def test_a_word_that_is_in_no_name() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "no such"], capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr == b"take-out-protections: no protection's name has no such\n"
