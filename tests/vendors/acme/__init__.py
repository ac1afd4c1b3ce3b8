"""ACME's NPUs, which don't exist: the second vendor of the tests, as short as possible."""
