"""Shared libraries: ELF, ld.so.cache, and where in a container they go."""
