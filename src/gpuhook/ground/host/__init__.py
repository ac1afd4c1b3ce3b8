"""Files and processes of the host, of which some belong to hostile users."""
