"""Host inventories: data model, saved copies and their freshness, selection by name."""
