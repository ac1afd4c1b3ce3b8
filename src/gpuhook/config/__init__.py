"""The configuration: config.toml read into plain data."""

from gpuhook.config.loader import DEFAULT_PATH, load, loads
from gpuhook.config.model import Config

__all__ = ["DEFAULT_PATH", "Config", "load", "loads"]
