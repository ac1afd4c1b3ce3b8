"""Containers' requests for NVIDIA devices, read from OCI specs that a test makes."""

from typing import Any

from machines import read_request

from gpuhook.base.config.model import Config
from gpuhook.core.request.reader import Request

__all__ = ["ROOT", "config_of", "mounts_request", "read_request", "request_for", "spec_of"]

ROOT = "/var/run/nvidia-container-devices"


def config_of(**settings: Any) -> Config:
    config = Config()
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def spec_of(*env: str, mounts: list[str] | None = None) -> dict[str, Any]:
    return {
        "process": {"env": list(env)},
        "mounts": [{"source": "/dev/null", "destination": name} for name in mounts or []],
    }


def request_for(*env: str, **settings: Any) -> Request:
    return read_request(spec_of(*env), config_of(**settings))


def mounts_request(*names: str, env: tuple[str, ...] = (), **settings: Any) -> Request:
    spec = spec_of(*env, mounts=[f"{ROOT}/{name}" for name in names])
    return read_request(spec, config_of(accept_volume_mounts=True, **settings))
