"""RESP, the protocol of Redis, in both directions. No I/O."""
