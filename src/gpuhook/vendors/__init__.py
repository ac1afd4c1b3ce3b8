"""Vendors of accelerators, one package each."""
