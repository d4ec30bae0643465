"""Maps URL schemes to tier classes. A class is imported on first use, so no optional package is required."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from importlib import import_module

from lmtier.config import WEAR, TierSpec, parse_seconds, parse_size, suggest
from lmtier.errors import ConfigError, TierError, excerpt
from lmtier.format.compression import CODECS, find
from lmtier.tiers.base import Tier
from lmtier.tiers.keyring import Keyring

BUILTIN = {
    "disk": "lmtier_backends.disk:DiskTier",
    "null": "lmtier_backends.null:NullTier",
    "redis": "lmtier_backends.redis.tier:RedisTier",
    "rediss": "lmtier_backends.redis.tier:TlsTier",
    "unix": "lmtier_backends.redis.tier:UnixTier",
    "redis-sentinel": "lmtier_backends.redis.tier:SentinelTier",
    "redis-cluster": "lmtier_backends.redis.tier:ClusterTier",
    "lmtier": "lmtier_backends.redis.source:SourceTier",
    "lmtiers": "lmtier_backends.redis.source:TlsSourceTier",
    "s3": "lmtier_backends.s3.tier:S3Tier",
    "mooncake": "lmtier_backends.mooncake.tier:MooncakeTier",
}
GROUP = "lmtier.tiers"
_LOCK = "lock"  # a parameter of a constructor that no URL can set


def load_tier(scheme: str) -> type[Tier]:
    """The class behind `scheme://`: built-in first, then the entry points of group lmtier.tiers."""
    target = BUILTIN.get(scheme)
    if target is None:
        from importlib.metadata import entry_points  # takes 25 ms, and most tiers are built in

        for entry_point in entry_points(group=GROUP, name=scheme):
            target = entry_point.value
        if target is None:
            schemes = {*BUILTIN, "cpu", *(entry_point.name for entry_point in entry_points(group=GROUP))}
            raise ConfigError(f"unknown tier {scheme}://{suggest(scheme, schemes)}")
    module, _, attribute = target.partition(":")
    try:
        cls = getattr(import_module(module), attribute)
    except ImportError as error:
        raise TierError(f"tier {scheme}:// needs a package that is not installed: {error}") from None
    if not (isinstance(cls, type) and issubclass(cls, Tier)):
        raise ConfigError(f"tier {scheme}://: {target} is not a subclass of lmtier.BlockingTier")
    if inspect.isabstract(cls):
        lacks = ", ".join(sorted(cls.__abstractmethods__))
        raise ConfigError(f"tier {scheme}://: {target} has no {lacks}; write what its base class asks for")
    return cls


def open_tier(spec: TierSpec, lock: int | None = None) -> Tier:
    """Open the tier that a URL names. Its options are its constructor's keyword-only parameters.

    `lock`: the file that `Tier.lock` of another process has handed over.
    """
    cls = load_tier(spec.scheme)
    parameters = inspect.signature(cls.__init__).parameters.values()
    hints = typing.get_type_hints(cls.__init__)
    options = {each.name: each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
    options.pop(_LOCK, None)
    values: dict[str, object] = {} if lock is None else {_LOCK: lock}
    for name, text in spec.options.items():
        if name not in options:
            common = ("capacity", "write", "policy", "codec", "ttl", "seal", "key", "tenants", *WEAR)
            raise ConfigError(f"{spec}: unknown option {name!r}{suggest(name, {*options, *common})}")
        try:
            values[name] = _READERS[hints.get(name, str)](text)
        except ConfigError as error:
            raise ConfigError(f"{spec}: {name}={error}") from None
        except KeyError:
            raise ConfigError(f"{spec}: {name}={excerpt(text)} is not true or false") from None
    if spec.codec in CODECS:
        find(spec.codec)  # before anything is opened
    keys = Keyring(spec.key, spec.tenants, str(spec)) if spec.seal else None
    if "ttl" in options:  # it is the cache's option, and this tier wants to know it
        values["ttl"] = spec.ttl
    for name, option in options.items():
        if option.default is inspect.Parameter.empty and name not in values:
            raise ConfigError(f"{spec} needs the option {name}=")
    factory: Callable[..., Tier] = cls
    tier = factory(spec.location, **values)
    try:
        tier.use_codec(spec.codec)
        if keys is not None:
            tier.use_keys(keys)
    except BaseException:
        tier.close()
        raise
    return tier


_READERS: dict[object, Callable[[str], object]] = {
    str: str,
    int: parse_size,
    float: parse_seconds,
    bool: lambda text: {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text],
}
