"""Tiered KV-cache offload for LLM serving."""

__version__ = "0.1.0"
