"""The maintainer of a Debian package is who builds it, by an address of theirs."""

import os
import pwd
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts/lib/maintainer"
NO_GIT = dict.fromkeys(("GIT_DIR", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), "/nonexistent")


def maintainer(home: Path, **env: str) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(home)} | env
    done = subprocess.run([SCRIPT], env=env, capture_output=True, text=True, check=True)
    return done.stdout


def git_user(home: Path) -> dict[str, str]:
    file = home / "gitconfig"
    file.write_text('[user]\nname = "Grace Hopper"\nemail = grace@navy.example\n')
    return NO_GIT | {"GIT_CONFIG_GLOBAL": str(file)}


def test_the_variables_of_debians_tools_count_first(tmp_path: Path) -> None:
    env = {"DEBFULLNAME": "Ada / & Co", "DEBEMAIL": "ada@engine.example"} | git_user(tmp_path)
    assert maintainer(tmp_path, **env) == "Ada / & Co <ada@engine.example>\n"


def test_the_user_of_git_comes_next(tmp_path: Path) -> None:
    assert maintainer(tmp_path, **git_user(tmp_path)) == "Grace Hopper <grace@navy.example>\n"


def test_without_either_it_is_the_user_of_this_machine(tmp_path: Path) -> None:
    name, _, address = maintainer(tmp_path, **NO_GIT).rstrip(">\n").partition(" <")
    user, _, host = address.partition("@")
    assert name
    assert user == pwd.getpwuid(os.geteuid()).pw_name
    assert host
    assert not host.endswith((".invalid", ".example"))
