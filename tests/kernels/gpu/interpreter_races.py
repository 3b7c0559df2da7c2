"""For interpreter.py: accesses to shared memory that no barrier orders, by functions of inline PTX and by wgmma.

Races among the warps of one warpgroup are not seen, nor those of two functions that write parts of one Ref.
"""

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

_original = gpu_callbacks.wgmma
WRITERS = ("convert", "load_rows", "put_block", "put_numbers")
"""Functions of inline PTX that write all of the last Ref that they are given. Others read theirs, or write only parts
of their own, so that two of them may have one Ref at a time."""


def check_races(thread, places, writes: bool = False, by_tensor_cores: bool = False):
    """Fails if another thread may access one of these places meanwhile, or a member beside it of a RefUnion, and one of
    the two writes. writes: the last place. Does nothing without detect_races=True."""
    memory = gpu_callbacks._get_shared_memory()
    if not memory.detect_races:
        return
    clock, races = memory.incr_clock(thread).generic_clock, gpu_callbacks.get_races()
    if by_tensor_cores:  # between their accesses and those of TMA there need be no fence
        memory.commit_smem(thread)
    for n, place in enumerate(places, 1):
        check = races.check_write if writes and n == len(places) else races.check_read
        check(thread, clock, *place, source_info=None)


@gpu_callbacks.fail_on_exception
def multiply(*, thread, **operands):
    """wgmma, whose operands in shared memory are checked."""
    memory, places = gpu_callbacks._get_shared_memory(), []
    for name in "ab":
        key = gpu_callbacks.HostAllocationKey.from_array(operands[f"{name}_allocation_key_as_array"])
        steps = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(operands[f"{name}_transforms"]))
        places.append((key, memory.access(key, steps)))
    check_races(thread, places, by_tensor_cores=True)
    return _original(thread=thread, **operands)
