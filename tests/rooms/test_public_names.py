"""The public names are a contract: a new one is listed here with its reason, a lost one breaks users."""

import jattn

CONTRACT = {
    "spec": ["AttentionSpec", "AttentionType", "AttentionParams", "KVCacheSpec"],
    "cache": ["PagedKV", "empty_cache", "write_kv", "copy_blocks", "swap_blocks"],
    "metadata": [
        "CommonAttentionMetadata",
        "split_decodes_and_prefills",
        "reorder_batch_to_split_decodes_and_prefills",
        "make_local_attention_virtual_batches",
        "infer_global_hyperparameters",
        "get_per_layer_parameters",
        "get_kv_cache_layout",
        "get_scheduler_metadata",
        "get_dcp_local_seq_lens",
    ],
    "attention": [
        "PagedAttention",
        "AttentionState",
        "paged_attention",
        "attention",
        "merge",
        "cascade_attention",
    ],
    "mla": ["MLAAttention", "MLASpec"],
    "flax and models": ["nn", "models"],
    "engine": ["Engine", "SamplingParams", "RequestOutput"],
    "choice": ["list_backends", "explain", "BackendReport", "UnsupportedError"],
}
ADDITIONS = {  # name: why it earns a place on the contents page
    "Embedder": "embeddings of texts, as Engine generates tokens: a folder's pooling, prompts and tokenizer",
    "Buckets": "the sizes a server pads to, which bound its number of compilations",
    "cascade_levels": "the shared-prefix levels of a batch, which cascade_attention takes",
    "MLAParams": "the traced weights and scales of MLA, as AttentionParams are of attention",
    "mla_cache_spec": "a latent cache's spec from an MLASpec, so that nobody works out its two widths by hand",
    "Feature": "the names of what needs= asks for, which a backend lists",
    "register_backend": "a backend of a user's own, found by 'auto'",
    "tensor_parallel": "a layer's heads shared out over devices",
    "decode_context_parallel": "a request's keys shared out over devices",
    "check_host": "the checks on values that a caller runs before device_put",
}


def test_the_contents_page_is_the_contract_and_the_declared_additions():
    expected = {name for group in CONTRACT.values() for name in group} | set(ADDITIONS)
    assert set(jattn.__all__) == expected
    assert len(jattn.__all__) == len(set(jattn.__all__))


def test_every_public_name_is_there_and_documented():
    undocumented = [name for name in jattn.__all__ if not (getattr(jattn, name).__doc__ or "").strip()]
    assert not undocumented
