"""Rows of rules from lists of SamplingParams, as the engine makes them from its sequences."""

import numpy as np

from jattn.engine import rules


def sampling_rows(params, seeds, positions, remaining, stop_ids, num_rows):
    """The rules of len(params) rows, padded to num_rows."""
    packed = [rules.rules_of(*each, 0) for each in zip(params, seeds, stop_ids[: len(params)], strict=True)]
    column = lambda values: np.asarray([*values, *[0] * (num_rows - len(values))], np.int32)
    return rules.sampling_rows(rules.rules_of_batch(packed, num_rows), column(positions), column(remaining))


def penalties_of(params, histories, prompt_lens, num_rows, width):
    """The penalties of len(params) rows with these tokens so far, padded to num_rows x width."""
    packed = [rules.rules_of(p, 0, (), count) for p, count in zip(params, prompt_lens, strict=True)]
    history = np.full((num_rows, width), -1, np.int32)
    for row, tokens in zip(history, histories, strict=False):
        row[: len(tokens)] = tokens
    return rules.penalties(rules.rules_of_batch(packed, num_rows), history)
