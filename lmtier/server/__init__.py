"""The cache server: one process that owns a `Cache` and serves engines, Redis clients and browsers."""
