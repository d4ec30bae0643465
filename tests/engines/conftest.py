"""These tests run real models of transformers, with random weights: pip install lmtier[transformers]."""

from importlib.util import find_spec

if find_spec("transformers") is None:
    collect_ignore_glob = ["test_transformers*.py"]
