"""Files and processes of the host, including those of hostile users."""
