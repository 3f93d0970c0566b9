"""Weights of tenants, as they are set: twice the weight is twice the share (`shares`). Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

UNNAMED = 1.0
"""The weight of every tenant that none was set for, requests without a tenant among them."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Set ones by tenant."""

    by_tenant: Mapping[str, float] = field(default_factory=dict)

    def of(self, tenant: str) -> float:
        """A tenant's weight."""
        return self.by_tenant.get(tenant, UNNAMED)


def parse_weights(text: str) -> Weights:
    """Reads, for example, "gold=2,trial=0.5"; "" sets none. ValueError names the part that is wrong."""
    by_tenant: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.rpartition("=")
        if not (name and equals):
            raise ValueError(f"{part!r} is not of the form NAME=WEIGHT")
        if name in by_tenant:
            raise ValueError(f"{name}= is there twice")
        by_tenant[name] = _weight(name, value)
    return Weights(by_tenant)


def _weight(name: str, value: str) -> float:
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f"{name}={value} is not a finite number > 0")
    return weight
