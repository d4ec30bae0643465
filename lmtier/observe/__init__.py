"""Metrics, the journal of changes, miss curves, and the tokens of prompts. No I/O."""
