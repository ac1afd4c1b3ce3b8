"""Code for commands and services, which a container start never imports."""
