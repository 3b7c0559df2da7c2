"""Checks each request before it is queued. A refusal lists every reason."""

import contextlib
import hashlib
import struct
from array import array
from collections.abc import Mapping, Set
from collections.abc import Sequence as Many
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.engine.blocks import request_root
from jattn.engine.outputs import Completion, FinishReason, RequestOutput
from jattn.engine.params import SamplingParams, is_encodable
from jattn.engine.scheduler import Limits
from jattn.errors.arguments import BYTES, check_kind, short
from jattn.text.tokenizer import Tokenizer, encoded

NO_PROMPTS = "prompts must be a text, token ids, or a list of these, got "
NOT_PROMPTS = *BYTES, Mapping, Set
"""Types with members that are neither prompts nor token ids."""


def check(
    prompt: str | Many[int],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    limits: Limits,
    salt: str = "",
) -> tuple[tuple[int, ...], array, dict[str, str]]:
    """(the prompt's tokens, the same as int32, the argument -> why it is wrong).

    The request can be served if the dict is empty.
    """
    wrong = {}
    if not isinstance(params, SamplingParams):
        wrong["params"] = f"params is {type(params).__name__}, not jattn.SamplingParams"
    if not isinstance(salt, str) or not is_encodable(salt):
        wrong["salt"] = f"salt={salt!a} must be text without surrogates"
    try:
        tokens, words = _tokens(prompt, tokenizer)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a JAX array that was deleted
        return (), array("i"), wrong | {"prompt": str(error)}
    if not tokens:
        wrong["prompt"] = "the prompt is empty: there is no token to continue from"
    elif outside := _outside(tokens, vocab_size, words):
        wrong["prompt"] = f"tokens {outside}"
    elif len(tokens) >= limits.max_model_len:
        most = limits.max_model_len
        wrong["prompt"] = f"the prompt has {len(tokens)} tokens, and prompt and output together may have {most}"
    if "params" in wrong:
        return tokens, words, wrong
    if outside := _outside(params.stop_token_ids, vocab_size):
        wrong["stop_token_ids"] = f"stop_token_ids {outside}"
    if params.stop and tokenizer is None:
        wrong["stop"] = "stop strings need a tokenizer; use stop_token_ids"
    return tokens, words, wrong


def _outside(ids: Many[int], vocab_size: int, words: array | None = None) -> str:
    """The error for ids that are not tokens; empty if there are none. words: the same numbers, if they are known."""
    if words:
        known = np.frombuffer(words, np.int32)
        if known.min() >= 0 and known.max() < vocab_size:
            return ""
    bad = sorted({token for token in ids if not 0 <= token < vocab_size})
    return f"{bad[:5]} are outside the vocabulary of {vocab_size}" if bad else ""


def prompts_of(prompts: Any) -> list:
    """One prompt (a text, or token ids) or several of them, as a list.

    TypeError if none of them could be a prompt; beside one that could, what is no prompt fails alone.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (np.ndarray, jax.Array)):
        if not prompts.ndim or (prompts.size and not jnp.issubdtype(prompts.dtype, jnp.integer)):
            raise TypeError(NO_PROMPTS + short(prompts))
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if isinstance(prompts, NOT_PROMPTS) or not hasattr(prompts, "__iter__"):
        raise TypeError(NO_PROMPTS + type(prompts).__name__)
    prompts = list(prompts)
    if prompts and all(map(_is_token_id, prompts)):
        return [prompts]
    if prompts and not any(map(_may_be_prompt, prompts)):
        kinds = sorted({type(each).__name__ for each in prompts})
        raise TypeError(f"{NO_PROMPTS}a list of {' and '.join(kinds[:4])}")
    return prompts


def _is_token_id(x: Any) -> bool:
    if type(x) is int:
        return True
    if getattr(x, "ndim", None) == 0:  # of any library: dtypes of torch are not numpy's
        return "int" in str(x.dtype)
    return isinstance(x, int) and not isinstance(x, bool)


def _may_be_prompt(x: Any) -> bool:
    """Is it a text, or a sequence of whatever?"""
    return hasattr(x, "__len__") and getattr(x, "ndim", 1) > 0 and not isinstance(x, NOT_PROMPTS)


def params_of(params: Any, count: int) -> list[SamplingParams | None]:
    """The params of each of so many prompts. params: for all of them, or a list or tuple with those of each."""
    kinds, way_out = (SamplingParams, type(None)), "make one with jattn.SamplingParams(max_tokens=...)"
    if not isinstance(params, (list, tuple)):
        return [check_kind("params", params, kinds, way_out)] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts but {len(params)} SamplingParams: give one, or one for each prompt")
    return [check_kind(f"params[{i}]", each, kinds, way_out) for i, each in enumerate(params)]


def depends_on_length(config: Any) -> bool:
    """Do a request's keys depend on its final length? No for a config without the attribute, e.g. a user's own."""
    return getattr(config, "rope_depends_on_length", False)


def root_hash_of(salt: str, config: Any, final_length: int) -> bytes:
    """A hash of a request's salt and rope variant: its cached blocks depend on both, besides its tokens."""
    variant = config.rope_variant(final_length) if depends_on_length(config) else ()
    return request_root(hashlib.blake2b(salt.encode()).digest(), variant)


def refused(id: str, tokens: tuple[int, ...], wrong: dict[str, str]) -> RequestOutput:
    """The output of a request that cannot be served."""
    error = "; ".join(wrong.values())
    return RequestOutput(id, tokens, (Completion(0, "", (), finish_reason=FinishReason.ERROR, error=error),))


def _tokens(prompt: str | Many[int], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], array]:
    """(the tokens, the same as int32)"""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer; this engine has none: give token ids")
        if not is_encodable(prompt):
            raise ValueError("the prompt holds a surrogate, which is no character and cannot be encoded as UTF-8")
        prompt = tuple(encoded(tokenizer, prompt))
    if isinstance(prompt, BYTES):
        kind = type(prompt).__name__
        raise ValueError(f"a prompt of {kind} is neither text nor token ids: decode it, or give list(prompt)")
    if isinstance(prompt, (list, tuple)):
        prompt = tuple(prompt)  # a list may change while it is read
        types = list(map(type, prompt))
        if types.count(int) == len(types):  # the usual case; a prompt may have 100,000 tokens
            return prompt, _words(prompt)
        if bool in [getattr(each, "dtype", type(each)) for each in prompt]:
            raise ValueError("a prompt must be text or a list of token ids, and a bool is no token id")
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"a prompt must be text or a list of token ids, not shape {ids.shape} of {ids.dtype}")
    tokens = tuple(ids.astype(np.int64).tolist())
    return tokens, _words(tokens)


def _words(tokens: tuple[int, ...]) -> array:
    """The tokens as int32; empty if a number is beyond it, and so no token."""
    with contextlib.suppress(struct.error):
        return array("i", struct.pack(f"{len(tokens)}i", *tokens))  # a third of the time of array("i", tokens)
    return array("i")
