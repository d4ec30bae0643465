"""The cache server: one process that owns a `Cache` and gives it to engines, Redis clients and people."""
