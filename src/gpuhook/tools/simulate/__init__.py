"""Driver roots with accelerators that don't exist, for tests: the ground of each vendor's."""
