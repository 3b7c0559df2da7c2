// Deliberate faults that the tests must detect (tests/kernels/cpu/test_native_mutants.py). A library built with
// -DJATTN_MUTANTS evaluates `wrong` instead of `right` for the fault that is switched on. Other builds contain only
// `right`.
#pragma once

#ifdef JATTN_MUTANTS
namespace jattn {
enum class Mutant : int {
    none,
    causal_off_by_one,
    window_off_by_one,
    chunk_off_by_one,
    scale_ignored,
    scales_swapped,
    query_scale_ignored,
    token_scale_of_another_key,
    soft_cap_ignored,
    slope_of_another_head,
    heads_interleaved,
    sink_twice,
    lse_in_base_two,
    last_page_dropped,
    splits_not_rescaled,
    decode_tiles_not_rescaled,
    prefill_tiles_not_rescaled,
    padding_not_cleared,
    negative_slot_written,
    scale_not_divided,
    product_inputs_dropped,
    product_groups_not_summed,
    product_columns_unordered,
    product_tail_dropped,
    latent_not_in_keys,
    packed_factor_ignored,
    packed_scales_of_first_group,
    packed_zero_points_ignored,
    empty_experts_not_counted,
    expert_rows_not_skipped,
    top_k_off_by_one,
    top_p_of_all_ties,
    groups_have_the_same_noise,
    large_noise_ignored,
    likeliest_of_equal_sums,
};
inline Mutant mutant = Mutant::none;
}  // namespace jattn
#define JATTN_MUTANT(name, wrong, right) (jattn::mutant == jattn::Mutant::name ? (wrong) : (right))
#else
#define JATTN_MUTANT(name, wrong, right) (right)
#endif
