"""Containers that run already: which has what, records of them, repair."""
