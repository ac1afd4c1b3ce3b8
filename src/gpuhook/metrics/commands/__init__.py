"""The commands metrics and stats."""
