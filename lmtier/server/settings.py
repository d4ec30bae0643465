"""The settings that change while a server runs: capacity, policy and ttl of a tier, and the level of the log.

Either all of a command's settings change, or none. They last until the server ends: the next one reads its
settings where this one did.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from lmtier.config import LEVELS, suggest, with_option
from lmtier.core.cache import Cache
from lmtier.core.match import CPU
from lmtier.errors import ConfigError, log

OPTIONS = ("capacity", "policy", "ttl")
"""The options of a tier that can change."""
LOG_LEVEL = "log_level"


def change(cache: Cache, given: Mapping[str, str]) -> list[str]:
    """Change settings by their names, like cpu.capacity or log_level. Returns a line for each.

    Raises ConfigError or MisuseError, and then nothing has changed.
    """
    config, urls = cache.config, list(cache.config.tiers)
    labels = [CPU, *(tier.label for tier in cache.lower)]
    changeable = [LOG_LEVEL, *(f"{label}.{option}" for label in labels for option in OPTIONS)]
    lines: list[str] = []
    actions: list[Callable[[], None]] = []
    for name, value in given.items():
        if name not in changeable:
            raise ConfigError(f"{name!r} cannot change while the server runs{suggest(name, changeable)}")
        if name == LOG_LEVEL:
            if value not in LEVELS:
                raise ConfigError(f"unknown log_level={value!r}{suggest(value, LEVELS)}")
            old_value = _level()
            actions.append(lambda level=value: log.setLevel(level.upper()))  # type: ignore[misc]  # mypy: lambdas
        else:
            label, _, option = name.partition(".")
            number = labels.index(label)
            old_value = _shown(getattr(config.cache_tiers[number], option))
            urls[number] = with_option(urls[number], option, value)
        lines.append(f"{name}: {old_value} -> {value}")
    if urls != list(config.tiers):
        cache.change(replace(config, tiers=tuple(urls)))
    for action in actions:
        action()
    return lines


def _level() -> str:
    return logging.getLevelName(log.getEffectiveLevel()).lower()


def _shown(value: object) -> str:
    return "none" if value in (None, float("inf")) else str(value)
