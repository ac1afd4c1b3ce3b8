"""gpuhook puts GPUs into containers: an OCI runtime shim, a prestart hook and a command line."""

__version__ = "0.3.0"
