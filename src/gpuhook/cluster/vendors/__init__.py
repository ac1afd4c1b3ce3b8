"""Vendors' modules for clusters."""
