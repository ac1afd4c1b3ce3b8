"""Driver roots with accelerators that don't exist, for tests, and ``gpuhook simulate``."""

__version__ = "0.3.0"
