"""The faults that `broken.py` can give the connector, by name."""

OF_MEMORY = (
    "a byte",
    "values of two blocks swapped",
    "a layer stale",
    "another scale",
    "the last chunk missing",
    "blocks off by one",
)
OF_NAMES = (
    "the salt ignored",
    "the adapter ignored",
    "named by length",
    "named without what comes before",
)
FAULTS = (*OF_MEMORY, *OF_NAMES, "loaded too late", "more promised than loaded")
