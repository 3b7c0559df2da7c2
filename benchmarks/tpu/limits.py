"""Data-sheet limits of one JAX device of each TPU generation: memory, products, links between chips, clock.

From the chips' public pages and the JAX scaling book; the clocks of v6e and tpu7x are assumed. Nothing was measured.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of one device as JAX counts them: of a chip; on tpu7x, of half a chip. A v5p device has two cores."""

    hbm: float  # bytes/s
    products: float  # bf16 FLOP/s
    link: float  # bytes/s in one direction of one link of a chip
    clock: float  # bundles/s of a core
    cores: int = 1  # a Pallas kernel runs on one of them unless it asks for all
    devices_of_chip: int = 1

    def collective_seconds(self, kind: str, size: int, devices: int) -> float:
        """Seconds of a ring over the chips of a 2x2 slice, in which each chip sends to two neighbours at once.

        size: bytes of the result on one device. Neither the latency of a hop nor the link within a chip is counted.
        """
        chips = devices // self.devices_of_chip
        passes = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": chips, "all-to-all": 1}.get(kind, chips)
        return passes * size * (chips - 1) / chips / (2 * self.link)


CHIPS = {
    "v5e": Limits(hbm=0.819e12, products=197e12, link=4.5e10, clock=1.5e9),
    "v6e": Limits(hbm=1.64e12, products=918e12, link=9e10, clock=1.75e9),
    "v5p": Limits(hbm=2.765e12, products=459e12, link=9e10, clock=1.75e9, cores=2),
    "tpu7x": Limits(hbm=3.69e12, products=1153e12, link=9e10, clock=2.2e9, devices_of_chip=2),
}
