"""SideExperts: a mixture of experts beside the MLP of a layer, which has both."""

import dataclasses
from typing import Any

from jattn.models.moe import MoE
from jattn.models.residual import norm_weight_specs
from jattn.nn.norm import Norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideExperts:
    """Experts whose output is added to that of the layer's MLP.

    is_late false (Gemma 4): x + norms.after(mlp_after(mlp(norms.before(x))) + after(moe(before(x)))), where `norms` are
    those of the MLP. The router reads x.
    is_late true (LongCat Flash): the experts read norms.before(x) as the MLP does, and their output is added to the
    residual stream after the next layer, or at the end if there is none.
    """

    moe: MoE
    before: Norm | None = None
    after: Norm | None = None
    mlp_after: Norm | None = None
    is_late: bool = False

    def __post_init__(self):
        if self.is_late and not self.before is self.after is self.mlp_after is None:
            raise ValueError("late experts have no norms of their own: pass neither before, after nor mlp_after")

    def weight_specs(self, hidden: int) -> dict[str, Any]:
        """The weights `experts` and those of the norms."""
        norms = dict(experts_norm=self.before, experts_norm_after=self.after, mlp_norm_own=self.mlp_after)
        return {"experts": self.moe.weight_specs(hidden)} | norm_weight_specs(hidden, norms)
