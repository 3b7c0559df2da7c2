"""A mixture of experts, compared with its definition, one token and one expert at a time."""

import numpy as np

from jattn.models.moe import MoE

E, TOP, WIDTH, HIDDEN, T = 5, 2, 6, 4, 9


def silu(x):
    return x / (1 + np.exp(-x))


def by_the_definition(weights, x, on_input: bool):
    """float64[T hidden]: the TOP experts of each token, weighted on what they give or on what they get."""
    router, gate, up, down = (
        np.asarray(weights[name]["kernel"], np.float64) for name in ("router", "gate", "up", "down")
    )
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        logits = row @ router
        best = np.argsort(-logits)[:TOP]
        share = 1 / (1 + np.exp(-logits[best])) if on_input else np.exp(logits[best]) / np.exp(logits[best]).sum()
        for e, weight in zip(best, share, strict=True):
            seen = row * weight if on_input else row
            y = (silu(seen @ gate[e]) * (seen @ up[e])) @ down[e]
            out[t] += y if on_input else y * weight
    return out


def drawn() -> tuple[dict, np.ndarray]:
    """Weights of E experts, and T tokens."""
    rng = np.random.default_rng(0)
    shapes = dict(router=(HIDDEN, E), gate=(E, HIDDEN, WIDTH), up=(E, HIDDEN, WIDTH), down=(E, WIDTH, HIDDEN))
    weights = {name: {"kernel": rng.normal(size=shape).astype(np.float32)} for name, shape in shapes.items()}
    return weights, rng.normal(size=(T, HIDDEN)).astype(np.float32)


def test_every_token_gets_what_its_own_experts_give():
    """Tokens of nine different pairs of experts: a row that comes back to another token's place is far off."""
    weights, x = drawn()
    for scores in ("softmax", "sigmoid_of_input"):
        moe = MoE(num_experts=E, top_k=TOP, width=WIDTH, scores=scores)
        wanted = by_the_definition(weights, x.astype(np.float64), scores == "sigmoid_of_input")
        assert np.abs(np.asarray(moe(weights, x)) - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_parts_of_the_experts_add_up_to_all():
    """As on the devices of a mesh, each of which has some of the experts."""
    weights, x = drawn()
    moe = MoE(num_experts=E, top_k=TOP, width=WIDTH)
    wanted = by_the_definition(weights, x.astype(np.float64), on_input=False)
    total = np.zeros_like(wanted)
    for first, count in ((0, 2), (2, 3)):
        part = {name: {"kernel": weights[name]["kernel"][first : first + count]} for name in ("gate", "up", "down")}
        total += np.asarray(moe.routed(part | {"router": weights["router"]}, x, first, count))
    assert np.abs(total - wanted).max() <= 1e-5 * np.abs(wanted).max()
