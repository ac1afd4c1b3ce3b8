"""The first command of the README, from a clone."""

import subprocess


def test_the_demo_works() -> None:
    done = subprocess.run(["./scripts/demo"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
