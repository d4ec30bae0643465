"""The settings that change while a server runs: capacity, policy and ttl of a tier, and the level of the log.

Either all of a command's settings change, or none. They last until the server ends: the next one reads its
settings where this one did.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from lmtier.config import LEVELS, TierSpec, suggest, with_option
from lmtier.core.cache import Cache
from lmtier.core.match import CPU
from lmtier.errors import ConfigError, excerpt, log, size_text
from lmtier.rules.lifetimes import FOREVER

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
            raise ConfigError(
                f"{excerpt(name)} cannot change while the server runs{suggest(name, changeable)}"
            )
        if name == LOG_LEVEL:
            if value not in LEVELS:
                raise ConfigError(f"unknown log_level={excerpt(value)}{suggest(value, LEVELS)}")
            old_value = _level()
            actions.append(lambda level=value: log.setLevel(level.upper()))  # type: ignore[misc]  # mypy: lambdas
        else:
            label, _, option = name.partition(".")
            number = labels.index(label)
            tier = config.cache_tiers[number]
            urls[number] = with_option(urls[number], option, value)
            old_value = _shown(tier, option)
            if option == "capacity":
                value = _shown(TierSpec.parse(urls[number]), option)
        lines.append(f"{name}: {old_value} -> {value}")
    if urls != list(config.tiers):
        cache.change(replace(config, tiers=tuple(urls)))
    for action in actions:
        action()
    return lines


def _level() -> str:
    return logging.getLevelName(log.getEffectiveLevel()).lower()


def _shown(tier: TierSpec, option: str) -> str:
    value = getattr(tier, option)
    if value in (None, FOREVER):
        return "none"
    return size_text(value) if option == "capacity" else f"{value:g} s" if option == "ttl" else str(value)
