"""The weights of an engine: taking them over, replacing them, and moving them to the host and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jattn.nn.weight_spec import weight_path
from jattn.ops.quantised import is_quantised
from jattn.parallel import put_local


def check(params: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """ValueError unless the arrays of params have these paths, as 'layers.0.attn.q.kernel', and these shapes."""
    leaves = jax.tree.leaves_with_path(params, is_leaf=is_quantised)
    seen = {weight_path(path): leaf for path, leaf in leaves}
    wrong = [f"{path} is missing" for path in shapes if path not in seen]
    wrong += [f"{path or 'params'} is unknown" for path in seen if path not in shapes]
    for path, leaf in seen.items():
        if path in shapes and not (_is_float(leaf) and tuple(leaf.shape) == tuple(shapes[path])):
            wrong.append(f"{path} is {_form(leaf)}, not a float {list(shapes[path])}")
    if wrong:
        raise ValueError(_do_not_fit(wrong))


def _do_not_fit(wrong: list[str]) -> str:
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return f"the weights do not fit this model: {'; '.join(wrong[:3])}{more}"


def _is_float(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _is_array(leaf: Any) -> bool:
    """Has it numbers? A jax.ShapeDtypeStruct, as jax.eval_shape returns, has none."""
    has_numbers = not any(isinstance(part, jax.ShapeDtypeStruct) for part in jax.tree.leaves(leaf))
    return has_numbers and hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def adopt(params: Any) -> Any:
    """The same weights in new containers, on the device.

    numpy arrays are copied, because the caller can write to them (on a CPU, device_put may share their memory even with
    may_alias=False). JAX arrays are shared: the caller must not delete or donate them.
    """
    return jax.tree.map(
        lambda x: _with_auto_axes(x) if isinstance(x, jax.Array) else jax.device_put(np.array(x)), params
    )


def _with_auto_axes(x: jax.Array) -> jax.Array:
    """x, in place, as an array of a mesh whose axes are Auto. With Explicit ones (of jax.make_mesh, or made inside
    jax.set_mesh) JAX would want to be told the sharding of every result of a program.
    """
    place = x.sharding
    if not isinstance(place, NamedSharding) or not isinstance(place.mesh, Mesh) or not place.mesh.explicit_axes:
        return x
    names = place.mesh.axis_names
    mesh = Mesh(place.mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))
    return jax.device_put(x, NamedSharding(mesh, place.spec, memory_kind=place.memory_kind))


def distributed(params: Any, shardings: Any) -> Any:
    """The same weights in new containers, each placed by its sharding; ValueError if the trees differ.

    Arrays that are placed so already are shared: see `adopt`. Of all others only the parts are copied.
    """
    places, structure = jax.tree.flatten(shardings)
    leaves, seen = jax.tree.flatten(params, is_leaf=is_quantised)
    if structure != seen:
        raise ValueError(f"the containers of the weights are {seen}, not {structure}")
    return jax.tree.unflatten(structure, [_distributed(x, place) for x, place in zip(leaves, places, strict=True)])


def _distributed(x: Any, place: jax.sharding.Sharding) -> Any:
    if is_quantised(x):
        from jattn.models.placing import quantised_shardings, regrouped

        x = regrouped(x, place)
        return jax.tree.map(_distributed, x, quantised_shardings(x, place))
    if isinstance(x, jax.Array):
        return put_local(x, place)
    return jax.make_array_from_callback(np.shape(x), place, lambda index: np.array(x[index]))  # see `adopt`


def copied_like(old: Any, new: Any) -> Any:
    """A copy of `new` with the placement of `old`; ValueError unless structure, shapes and dtypes are equal."""
    new = _grouped_like(old, new)
    if wrong := _differences(old, new):
        raise ValueError(f"{_do_not_fit(wrong)}; nothing was changed")
    return jax.tree.map(lambda a, b: _placed(b, _place(a)), old, new)


def _grouped_like(old: Any, new: Any) -> Any:
    """`new`, whose quantised weights have the groups of `old` where those are smaller: see `distributed`."""
    leaves, structure = jax.tree.flatten(new, is_leaf=is_quantised)
    olds, wanted = jax.tree.flatten(old, is_leaf=is_quantised)
    if structure != wanted:
        return new
    fits = lambda a, b: is_quantised(a) and is_quantised(b) and a.shape == b.shape and b.group_size % a.group_size == 0
    pairs = zip(olds, leaves, strict=True)
    return jax.tree.unflatten(structure, [b.with_groups_of(a.group_size) if fits(a, b) else b for a, b in pairs])


def bound_like(params: Any, caches: Any) -> Any:
    """The caches, committed to the weights' device if the weights are committed to one.

    A dispatch returns them so, and JAX compiles separately for committed arrays.
    """
    places = {x.sharding for x in jax.tree.leaves(params) if x.committed}
    return jax.device_put(caches, places.pop()) if len(places) == 1 else caches


def _place(x: jax.Array) -> jax.sharding.Sharding | None:
    """The sharding that an array is committed to; None if it is not committed."""
    return x.sharding if x.committed else None


def _placed(x: Any, place: jax.sharding.Sharding | None) -> jax.Array:
    """A copy committed to `place`; None: not committed, which only a copy of a host array is."""
    x = np.asarray(x) if place is None and getattr(x, "committed", False) else x
    if not isinstance(x, jax.Array):
        return jax.device_put(np.array(x), place)  # see `adopt`
    return jax.device_put(x, place, may_alias=False)


class StoredWeights:
    """Weights on the host, and the shardings that they had."""

    def __init__(self, params: Any):
        self._places = [_place(x) for x in jax.tree.leaves(params)]
        self._host = jax.tree.map(lambda x: np.array(x), params)  # np.asarray may share the memory of the device

    def restored(self) -> Any:
        """The weights, on their devices again."""
        leaves, structure = jax.tree.flatten(self._host)
        return jax.tree.unflatten(structure, [_placed(x, place) for x, place in zip(leaves, self._places, strict=True)])


def _differences(old: Any, new: Any) -> list[str]:
    """The differences of structure, shape and dtype, with the names of the leaves."""
    name = jax.tree_util.keystr
    a = {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(old)}
    b = {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(new)}
    wrong = [f"{path} is missing" for path in a if path not in b]
    wrong += [f"{path} is unknown" for path in b if path not in a]
    for path in a:
        if path in b and (seen := _form(b[path])) != (wanted := _form(a[path])):
            wrong.append(f"{path} is {seen}, not {wanted}")
    if not wrong and jax.tree.structure(old) != jax.tree.structure(new):
        wrong.append(f"the containers are {jax.tree.structure(new)}, not {jax.tree.structure(old)}")
    return wrong


def _form(leaf: Any) -> str:
    if not _is_array(leaf):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"
