"""Mutants of the engine: one fault each, and the quick law that catches it."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from tests.bite.test_experts import (
    test_every_token_gets_what_its_own_experts_give,
    test_parts_of_the_experts_add_up_to_all,
)
from tests.engine import test_quick_laws as laws
from tests.engine import test_sampling_odd as sampling
from tests.engine import test_scheduler as scheduler
from tests.engine import test_shared_prefix as prefixes
from tests.models.test_model_mesh import test_layers_with_different_numbers_of_kv_heads

TABLES = "jattn.engine.tables.BlockTables"


@dataclasses.dataclass(frozen=True, eq=False)
class Mutant:
    """Its place, what it does to the original, and the tests that fail with it."""

    target: str
    make: Callable[[Callable], Callable]
    laws: tuple[Callable, ...]


def unsalted(original):
    """Hashes of blocks as if no request had a salt."""

    def mutant(self, seq, count):
        root_hash, seq.root_hash = seq.root_hash, b""
        original(self, seq, count)
        seq.root_hash = root_hash

    return mutant


def whole_prompt(original):
    """The last token is taken from the cache too: then no token is left to compute."""

    def mutant(self, seq):
        seq.tokens.append(2)
        hits = original(self, seq)
        seq.tokens.pop()
        return hits

    return mutant


def restricted(change):
    """`_is_kept` keeps other tokens: change(kept bool[R V], logits [R V])."""
    return lambda original: lambda scaled, floor: change(original(scaled, floor), scaled)


def one_fewer(kept, scaled):
    """Drops the least likely of the kept tokens, if there are several."""
    least = jnp.min(jnp.where(kept, scaled, jnp.inf), axis=-1, keepdims=True)
    return kept & ((scaled > least) | (kept.sum(axis=-1, keepdims=True) == 1))


def one_more(kept, scaled):
    """Keeps also the most likely of the other tokens."""
    next_one = jnp.max(jnp.where(kept, -jnp.inf, scaled), axis=-1, keepdims=True)
    return kept | (scaled == next_one)


def at_one_position(original):
    """Every draw of a burst with the key of its first step."""

    def mutant(logits, rows, penalties, recent, sampled, step, *more):
        back = dataclasses.replace(rows, position=rows.position - step)
        return original(logits, back, penalties, recent, sampled, step, *more)

    return mutant


def positions_lost(original):
    """A dispatch counts its draws from 0."""
    return lambda rules, position, remaining: original(rules, 0 * position, remaining)


MUTANTS = {
    "salt ignored": Mutant(
        f"{TABLES}._hash_blocks",
        unsalted,
        (
            laws.test_requests_of_different_salts_share_nothing_and_those_of_one_salt_do,
            scheduler.test_a_shared_beginning_is_computed_once_and_a_salt_keeps_it_apart,
        ),
    ),
    "a block's hash ignores the blocks before it": Mutant(
        "jattn.engine.tables.block_hash",
        lambda original: lambda parent, tokens: original(b"", tokens),
        (laws.test_a_block_is_shared_only_behind_the_same_beginning,),
    ),
    "a prefix hit of the whole prompt": Mutant(
        f"{TABLES}._longest_hit",
        whole_prompt,
        (
            laws.test_a_prompt_that_is_cached_whole_still_gets_its_tokens,
            scheduler.test_a_shared_beginning_is_computed_once_and_a_salt_keeps_it_apart,
        ),
    ),
    "untrusted blocks shared": Mutant(
        f"{TABLES}.release",
        lambda original: lambda self, seq, *, trusted=True: original(self, seq),
        (
            laws.test_blocks_that_a_failed_request_wrote_are_not_shared,
            scheduler.test_what_an_untrusted_sequence_wrote_is_not_shared,
        ),
    ),
    "window blocks given back a block too early": Mutant(
        "jattn.engine.tables.first_visible",
        lambda original: lambda group, position: original(group, position + 4),
        (laws.test_a_window_gives_no_block_back_that_is_still_seen,),
    ),
    "all blocks of the shortest row taken for shared": Mutant(
        "jattn.engine.shared_prefix.common_blocks",
        lambda original: lambda tables: min(map(len, tables)),
        (prefixes.test_rows_share_the_first_blocks_that_all_have_and_have_computed,),
    ),
    "penalties not applied": Mutant(
        "jattn.engine.sampling.penalised",
        lambda original: lambda logits, penalties: logits,
        (laws.test_penalties_are_applied_to_the_generated_tokens,),
    ),
    "penalties forget what the burst has sampled": Mutant(
        "jattn.engine.sampling.Penalties.after",
        lambda original: lambda self, sampled: original(self, jnp.full_like(sampled, -2)),
        (laws.test_penalties_are_applied_to_the_generated_tokens,),
    ),
    "a cut keeps one token fewer": Mutant(
        "jattn.engine.sampling._is_kept",
        restricted(one_fewer),
        (sampling.test_r47_without_the_library_a_cut_keeps_the_same,),
    ),
    "a cut keeps one token more": Mutant(
        "jattn.engine.sampling._is_kept",
        restricted(one_more),
        (sampling.test_r47_without_the_library_a_cut_keeps_the_same,),
    ),
    "draws of a burst alike": Mutant(
        "jattn.engine.dispatch.choose",
        at_one_position,
        (laws.test_a_seeded_request_draws_alike_in_bursts_of_any_length,),
    ),
    "a draw's position forgotten between dispatches": Mutant(
        "jattn.engine.batch.sampling_rows",
        positions_lost,
        (laws.test_the_draw_of_a_token_is_that_of_its_position,),
    ),
    "a key that does not advance": Mutant(
        "jattn.engine.sampling._row_key",
        lambda original: lambda seed, position: original(seed, 0 * position),
        (
            laws.test_flat_logits_are_drawn_differently_step_after_step,
            sampling.test_r36_draws_of_one_request_step_after_step_are_independent_and_have_the_softmax_s_shares,
        ),
    ),
    "the order of rows after the experts": Mutant(
        "jattn.models.moe.MoE._experts",
        lambda original: lambda self, *args: jnp.roll(original(self, *args), 1, axis=0),
        (test_every_token_gets_what_its_own_experts_give,),
    ),
    "a part of the experts computes the first part's": Mutant(
        "jattn.models.moe.MoE.routed",
        lambda original: lambda self, weights, x, first=0, *more: original(self, weights, x, 0, *more),
        (test_parts_of_the_experts_add_up_to_all,),
    ),
    "kv heads on the wrong axes of a mesh": Mutant(
        "jattn.models.model_mesh.ModelMesh.kv_axes",
        lambda original: lambda self, heads: self.axes[len(self.axes) - len(original(self, heads)) :],
        (test_layers_with_different_numbers_of_kv_heads,),
    ),
    "rows of experts not put back": Mutant(
        "jattn.models.moe.MoE._experts",
        lambda original: lambda self, w, x, rows, *sizes: original(self, w, x, rows, *sizes)[rows.choice],
        (test_every_token_gets_what_its_own_experts_give,),
    ),
}
