"""Objects in Redis, Valkey or another lmtier server: the tiers of seven URL schemes."""
