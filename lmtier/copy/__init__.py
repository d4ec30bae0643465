"""Copies between an engine's memory and the extents of a cache."""
