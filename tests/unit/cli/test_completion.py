"""Completion, as each shell's script asks for it."""

import os
import subprocess
import sys

import pytest

ENTRY = "from gpuhook.cli import main; main()"


def _gpuhook(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ENTRY, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("shell", "line", "expected"),
    [("bash", "gpuhook do", "plain,doctor"), ("zsh", "gpuhook do", "plain\ndoctor\n"),
     ("fish", "gpuhook do", "plain,doctor\t"), ("bash", "gpuhook doctor --rep", "plain,--report"),
     ("bash", "gpuhook doctor --format ", "plain,text\nplain,json"),
     ("bash", "gpuhook completion ", "plain,bash\nplain,zsh\nplain,fish")],
)  # fmt: skip
def test_words_are_completed(shell: str, line: str, expected: str) -> None:
    words = line.split(" ")
    settings = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    if shell == "fish":
        settings["COMP_CWORD"] = words[-1]
    done = _gpuhook(_GPUHOOK_COMPLETE=f"{shell}_complete", **settings)
    assert expected in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_name_the_variable(shell: str) -> None:
    done = _gpuhook("completion", shell)
    assert done.returncode == 0
    assert f"_GPUHOOK_COMPLETE={shell}_complete" in done.stdout


def test_the_script_works_in_bash(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "gpuhook"
    program.write_text(f"#!{sys.executable}\n{ENTRY}\n")
    program.chmod(0o755)
    script = (
        f'eval "$({program} completion bash)"; COMP_WORDS=({program} expl); COMP_CWORD=1; '
        f'_gpuhook_completion {program}; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "explain\n"


def test_an_unknown_shell() -> None:
    done = _gpuhook("completion", "csh")
    assert done.returncode == 2
    assert "csh" in done.stderr
