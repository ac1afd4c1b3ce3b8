"""What a host has: the records, saving them and knowing when they are stale, choosing by name."""
