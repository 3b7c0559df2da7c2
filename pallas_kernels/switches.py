"""Switches in the environment: variables that are 0 or 1."""

import os


def is_on(variable: str) -> bool:
    """False if the variable is 0, True if it is 1, empty or not set; ValueError for any other text."""
    text = os.environ.get(variable, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{variable}={text[:60]!r} in the environment must be 0 (off) or 1 (on)")
    return text != "0"
