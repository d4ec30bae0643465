"""The client of a cache server."""
