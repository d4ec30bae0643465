"""The cache and all its decisions. One owner calls it; it has no locks and never waits for I/O."""
