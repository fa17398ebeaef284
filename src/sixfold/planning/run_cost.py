"""Hours and money for a number of steps."""

from __future__ import annotations

from . import checks


def run_hours(*, steps: int, seconds_per_step: float) -> float:
    """Hours that a run takes.

    Args:
        steps: training steps.
        seconds_per_step: duration of a step.

    Raises:
        UserError: if a number is out of range.
    """
    checks.whole(steps=steps)
    checks.positive(seconds_per_step=seconds_per_step)
    return steps * seconds_per_step / 3600


def run_price(*, hours: float, devices: int, price_per_device_hour: float) -> float:
    """Price of a run, in the currency of `price_per_device_hour`.

    Args:
        hours: duration of the run.
        devices: devices that are rented for the whole run.
        price_per_device_hour: price of one device for one hour.

    Raises:
        UserError: if a number is out of range.
    """
    checks.not_negative(hours=hours, price_per_device_hour=price_per_device_hour)
    checks.whole(devices=devices)
    return hours * devices * price_per_device_hour
