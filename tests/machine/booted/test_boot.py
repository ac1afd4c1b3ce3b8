"""A typical host: booted by systemd, with cgroup v2, AppArmor and Docker in its default setup."""

from pathlib import Path

from booted import call


def test_no_unit_failed_at_boot() -> None:
    assert call("systemctl", "list-units", "--failed", "--plain", "--no-legend") == ""


def test_the_machine_has_systemd_cgroup_v2_and_apparmor() -> None:
    assert call("stat", "--file-system", "--format=%T", "/sys/fs/cgroup") == "cgroup2fs\n"
    assert Path("/sys/module/apparmor/parameters/enabled").read_text() == "Y\n"
    assert Path("/proc/sys/fs/protected_symlinks").read_text() == "1\n"
    asked = "{{.CgroupDriver}} {{.CgroupVersion}} {{.SecurityOptions}}"
    said = call("docker", "info", "--format", asked).split(" ", 2)
    assert said[:2] == ["systemd", "2"]
    assert "name=apparmor" in said[2]
    assert "name=seccomp" in said[2]
