"""What hits are worth: GPU-hours that were not computed, and their price. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

HOUR, DAY, GIB = 3600.0, 86400.0, float(1 << 30)


@dataclass(frozen=True, slots=True)
class GpuSavings:
    """What hits saved."""

    gpu_hours: float
    price: float
    """The price of an hour of all GPUs of an engine; 0: not known."""

    @property
    def money(self) -> float:
        return self.gpu_hours * self.price


def next_gib(
    hit: float, hit_with_more: float, more: float, *, asked: float, seconds: float, token: float, price: float
) -> GpuSavings:
    """What one more GiB would save in a day.

    `hit` is the hit ratio now, and `hit_with_more` the one with `more` bytes more. `asked` tokens were asked
    for in `seconds`. A token takes `token` seconds to compute.
    """
    gained = max(0.0, hit_with_more - hit) / more * GIB * asked * (DAY / seconds) if more and seconds else 0.0
    return GpuSavings(gained * token / HOUR, price)
