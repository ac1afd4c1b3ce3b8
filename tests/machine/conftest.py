"""These tests change the machine that they run on: only one that scripts/test-machine has booted."""

from pathlib import Path

collect_ignore_glob = [] if Path("/carried/start").exists() else ["*/test_*.py"]
