"""The command line, engines, doctor and running containers; no container start imports them."""
