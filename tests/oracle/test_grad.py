"""The hand-written derivative against central differences of the oracle."""

import numpy as np
import pytest

from tests.oracle.attention import attend_one
from tests.oracle.grad import attend_one_grad

OPTIONS = {
    "plain": dict(),
    "rows_without_keys": dict(q_pos=np.array([-2, -1, 0, 1])),
    "cap": dict(soft_cap=1.5),
    "alibi": dict(slopes=[0.3, -0.2, 0.7, 0.1]),
    "sinks": dict(sinks=[0.5, -1.0, 2.0, 0.0]),
    "everything": dict(
        soft_cap=2.0,
        slopes=[0.3, -0.2, 0.7, 0.1],
        sinks=[0.5, -1.0, 2.0, 0.0],
        window=(2, 1),
        causal=False,
        mask_fn=lambda h, i, j: (i + j + h) % 3 != 0,
    ),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_matches_central_differences(options):
    rng = np.random.default_rng(1)
    options = {"q_pos": np.arange(2, 6), "scale": 0.7, **options}
    inputs = dict(q=rng.normal(size=(4, 4, 3)), k=rng.normal(size=(6, 2, 3)), v=rng.normal(size=(6, 2, 5)))
    for name in ("slopes", "sinks"):
        if name in options:
            inputs[name] = np.array(options.pop(name))
    dout, dlse = rng.normal(size=(4, 4, 5)), rng.normal(size=(4, 4))

    def loss(**changed):
        out, lse = attend_one(**{**inputs, **changed}, **options)
        return (out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum()

    got = attend_one_grad(**inputs, dout=dout, dlse=dlse, **options)
    for name, x in inputs.items():
        wanted = np.zeros_like(x)
        for at in np.ndindex(x.shape):
            up, down = x.copy(), x.copy()
            up[at] += 1e-5
            down[at] -= 1e-5
            wanted[at] = (loss(**{name: up}) - loss(**{name: down})) / 2e-5
        np.testing.assert_allclose(got["d" + name], wanted, atol=1e-8, err_msg=name)
