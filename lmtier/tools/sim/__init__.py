"""Simulation: replays traces through the real `Cache`, without the bytes."""
