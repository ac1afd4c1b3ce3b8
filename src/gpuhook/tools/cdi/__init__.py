"""CDI documents as commands make them and keep them up to date."""
