"""Who uses which accelerator how much: what `gpuhook metrics` and `gpuhook stats` show."""
