"""Vendors in config.toml, compared with the registered ones."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuhook.base.config.loader import load, loads
from gpuhook.base.errors import ConfigError
from gpuhook.tools.cli.config import config as command
from gpuhook.vendors import registry

SWARM = 'swarm-resource = "DOCKER_RESOURCE_GPU, {}=DOCKER_RESOURCE_X"\n'
DECLARED = """\
[[gpuhook.vendors]]
name = "maker"
variable = "MAKER_VISIBLE_DEVICES"
kind = "a.b/c"
nodes = ["/dev/maker{n}"]
"""


def test_a_setting_for_a_known_vendor_is_accepted() -> None:
    assert registry.all_vendors(loads(SWARM.format("amd"))) is registry.BUILT_IN
    assert "maker" in registry.all_vendors(loads(SWARM.format("maker") + DECLARED))


def test_a_setting_for_an_unknown_vendor_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("# ours\n" + SWARM.format("nvida"))
    with pytest.raises(
        ConfigError, match="line 2: swarm-resource names the vendor 'nvida'"
    ) as caught:
        registry.all_vendors(load(str(file)))
    assert "nvidia, amd" in str(caught.value)
    done = CliRunner().invoke(command, ["validate", str(file)])
    assert (done.exit_code, done.stderr) == (1, f"error: {caught.value}\n")


def test_a_setting_for_an_unknown_vendor_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    words = ["set", "--config", str(file)]
    done = CliRunner().invoke(command, [*words, "swarm-resource=nvida=X"])
    assert isinstance(done.exception, ConfigError)
    assert not file.exists()
    done = CliRunner().invoke(command, [*words, "swarm-resource=nvidia=X"], catch_exceptions=False)
    assert load(str(file)).swarm_resource == "nvidia=X"
