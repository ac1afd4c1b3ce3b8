"""Ledger of this node's devices: the owner of each, and the settings that owners changed."""
