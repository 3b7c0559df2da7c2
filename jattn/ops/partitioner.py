"""Whether XLA's partitioner divides a function. It gathers the operands of custom calls, and of cuts across an axis."""

import jax


def is_partitioned() -> bool:
    """Will XLA's partitioner divide what is traced now? In shard_map it will not: the axes of the mesh are Manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in mesh.auto_axes + mesh.explicit_axes)
