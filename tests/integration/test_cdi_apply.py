"""Real low-level runtimes accept and apply config.json with CDI edits."""

import json
from pathlib import Path

from harness.bundles import Bundle
from harness.namespaces import Namespace

from gpuhook.base.names import HOOK_ENVIRONMENT
from gpuhook.base.oci.spec import read_spec
from gpuhook.core.cdi import apply, folders

# No driver has these nodes. If a container may open them, the kernel reports that there is no
# device.
DENIED, ALLOWED = "Operation not permitted", "No such device or address"
READ_ONLY = "Read-only file system"


def document(folder: Path) -> Path:
    """Write a CDI spec with every kind of edit that needs no hardware; return its folder."""
    hook = folder / "hook"
    hook.write_text("#!/bin/sh\n/usr/bin/env > $0.environment\n")
    hook.chmod(0o755)
    (folder / "file").write_text("of the host\n")
    mount = {
        "hostPath": str(folder / "file"),
        "containerPath": "/cdi/file",
        "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
    }
    nodes = [
        {"path": "/dev/mine", "type": "c", "major": 195, "minor": 250, "permissions": "rw"},
        {"path": "/dev/not-mine", "type": "c", "major": 195, "minor": 251, "permissions": "none"},
        {"path": "/dev/nothing", "hostPath": "/dev/null"},
    ]
    text = {
        "cdiVersion": "0.7.0",
        "kind": "vendor.com/thing",
        "containerEdits": {
            "mounts": [mount],
            "hooks": [{"hookName": "createRuntime", "path": str(hook)}],
        },
        "devices": [
            {"name": "0", "containerEdits": {"deviceNodes": nodes, "additionalGids": [4711]}},
            {"name": "1", "containerEdits": {"env": ["CDI=1"]}},
        ],
    }
    (folder / "cdi").mkdir()
    (folder / "cdi" / "thing.json").write_text(json.dumps(text))
    return folder / "cdi"


def test_runtimes_apply_the_edits_of_cdi_specs(
    bundle: Bundle, low_level: tuple[str, Namespace]
) -> None:
    found = folders.read_folders([str(document(bundle.path))])
    assert found.errors == []
    bundle.command(
        "sh", "-c",
        "cat /cdi/file; echo $CDI; id -G; touch /cdi/file; for node in mine not-mine; do "
        "cat /dev/$node; done; cat /dev/nothing && stat -c %t:%T /dev/nothing",
    )  # fmt: skip
    names = [f"vendor.com/thing={name}" for name in "010"]
    spec = read_spec(str(bundle.config))
    apply.apply_to_spec(spec, apply.resolve(found, names)).write()
    done = bundle.run(low_level[0]).ok()
    lines, errors = done.stdout.splitlines(), done.stderr.splitlines()
    assert (lines[0], lines[1], lines[-1]) == ("of the host", "1", "1:3"), done
    assert "4711" in lines[2].split()
    for what, cause in (
        ("/cdi/file", READ_ONLY),
        ("/dev/mine", ALLOWED),
        ("/dev/not-mine", DENIED),
    ):
        assert any(what in line and cause in line for line in errors), done
    environment = (bundle.path / "hook.environment").read_text().splitlines()
    assert set(HOOK_ENVIRONMENT) <= set(environment)
    assert not {line.partition("=")[0] for line in environment} - {
        "PATH", "LC_ALL", "PWD", "OLDPWD", "SHLVL", "_",
    }  # fmt: skip
