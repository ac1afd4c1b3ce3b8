"""Vendors' measurements of their devices."""
