"""The rules: eviction, shares, lifetimes, writing, and whether loading is worth it. No I/O, only numbers."""
