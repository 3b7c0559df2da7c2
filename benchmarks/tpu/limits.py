"""Limits of one JAX device of each TPU generation: those of jattn.engine.device_kinds, and what a kernel needs besides.

The clocks are from the chips' public pages; those of v6e and tpu7x are assumed. Nothing was measured.
"""

import dataclasses

from jattn.engine.device_kinds import KINDS


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of one device as JAX counts them: of a chip; on tpu7x, of half a chip. A v5p device has two cores."""

    name: str
    clock: float  # bundles/s of a core
    links: int  # of a chip, to its neighbours
    cores: int = 1  # a Pallas kernel runs on one of them unless it asks for all
    devices_of_chip: int = 1

    @property
    def hbm(self) -> float:
        """Bytes/s."""
        return KINDS[self.name].bandwidth

    @property
    def products(self) -> float:
        """bf16 FLOP/s."""
        return KINDS[self.name].peak

    @property
    def link(self) -> float:
        """Bytes/s in one direction of one link of a chip."""
        return KINDS[self.name].link * self.devices_of_chip / self.links

    def collective_seconds(self, kind: str, size: int, devices: int) -> float:
        """Seconds of a ring over the chips of a 2x2 slice, in which each chip sends to two neighbours at once.

        size: bytes of the result on one device. Neither the latency of a hop nor the link within a chip is counted.
        """
        chips = devices // self.devices_of_chip
        passes = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": chips, "all-to-all": 1}.get(kind, chips)
        return passes * size * (chips - 1) / chips / (2 * self.link)


CHIPS = {
    limits.name: limits
    for limits in (
        Limits("v5e", clock=1.5e9, links=4),
        Limits("v6e", clock=1.75e9, links=4),
        Limits("v5p", clock=1.75e9, links=6, cores=2),
        Limits("tpu7x", clock=2.2e9, links=6, devices_of_chip=2),
    )
}
