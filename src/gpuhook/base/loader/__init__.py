"""Shared libraries: ELF, ld.so.cache, and their folders in a container."""
