"""Plans: the operations that fulfil a request, and the formats they are written in."""
