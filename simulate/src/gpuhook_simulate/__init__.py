"""Driver roots with simulated accelerators, for tests, and ``gpuhook simulate``."""

__version__ = "0.3.0"
