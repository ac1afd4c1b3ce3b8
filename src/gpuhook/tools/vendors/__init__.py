"""Vendor code for commands and services, which a container start doesn't need."""
