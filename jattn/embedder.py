"""Embedder: embeddings of any number of texts, in ragged batches of a few sizes."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jattn import models
from jattn.errors.arguments import (
    BYTES,
    boolean,
    check_fields,
    check_kind,
    integer,
    no_arguments,
    optional,
    sequence_of,
    short,
    text,
)
from jattn.models.dense import DenseLayer, dense_layer, read_dense
from jattn.models.embedding import check_dim, output_size
from jattn.models.model_folder import weights_dtype
from jattn.models.sentence_folder import read_sentence_folder
from jattn.text import Tokenizer, load_tokenizer
from jattn.text.tokenizer import encoded

Input = str | Sequence[int]
"""A text, or its token ids."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedder:
    """A model, its tokenizer, and how its hidden states become embeddings. Make it with `from_pretrained`."""

    config: models.ModelConfig
    params: dict[str, Any]
    tokenizer: Tokenizer | None = None  # None: inputs are token ids
    pooling: str  # one of models.POOLINGS
    dense: tuple[DenseLayer, ...] = ()  # after pooling, before normalisation
    dim: int | None = None  # dimensions that are kept, before normalisation, if a call does not say; None: all
    normalize: bool = True
    max_tokens: int | None = None  # of an input; None: the model's own limit
    lower_case: bool = False  # texts are converted to lower case first
    prompts: dict[str, str] = dataclasses.field(default_factory=dict)  # name -> the text before an input
    default_prompt: str | None = None  # a name in prompts
    max_batched_tokens: int = 8192  # packed into one call
    backend: str = "auto"

    def __post_init__(self):
        if self.pooling not in models.POOLINGS:
            raise ValueError(f"pooling={self.pooling!r} must be one of {', '.join(models.POOLINGS)}")
        check_fields(
            self, normalize=boolean, lower_case=boolean, max_tokens=optional(integer(1)), max_batched_tokens=integer(1),
            backend=text, dim=optional(integer(1)), dense=sequence_of(dense_layer),
        )  # fmt: skip
        check_dim(self.dim, self.size)  # raises, too, if a layer does not fit
        for name, words in check_kind("prompts", self.prompts, dict).items():
            if not isinstance(name, str) or not isinstance(words, str):
                raise ValueError(f"prompts[{short(name)}]={short(words)}: names and prompts must be strings")
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise ValueError(f"default_prompt={self.default_prompt!r} must be one of {', '.join(self.prompts)}")

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        pooling: str | None = None,
        dtype: Any = None,
        quantization: str | None = None,
        progress: Callable[[int, int, str], None] | None = None,
        **options: Any,
    ) -> "Embedder":
        """An embedder for a Hugging Face folder. options: fields of Embedder, which override those of the folder.

        pooling: None: as the folder's modules.json says, a file of the sentence-transformers library. dtype,
        quantization and progress: as in models.load.
        """
        taken = {field.name for field in dataclasses.fields(cls)} - {"config", "params"}  # these are read
        if unknown := sorted(options.keys() - taken):
            raise no_arguments(f"{cls.__name__}.from_pretrained", unknown, taken)
        dtype = weights_dtype(dtype)
        found = read_sentence_folder(directory)
        pooling = found.pooling if pooling is None else pooling
        if pooling is None:
            raise ValueError(
                f"{directory} has no modules.json, so it does not say how its model's hidden states become an "
                f"embedding; pass pooling=, one of {', '.join(models.POOLINGS)}"
            )
        tokenizer = load_tokenizer(found.model)  # refused before weights are read
        dense = tuple(read_dense(folder, dtype) for folder in found.dense)
        size = output_size(models.load_config(found.model, head=False), dense)  # raises if a layer does not fit
        check_dim(options.get("dim", found.dim), size)
        config, params = models.load(found.model, dtype=dtype, quantization=quantization, progress=progress, head=False)
        fields: dict[str, Any] = dict(
            tokenizer=tokenizer, dense=dense, dim=found.dim, normalize=found.normalize, max_tokens=found.max_tokens,
            lower_case=found.lower_case, prompts=dict(found.prompts), default_prompt=found.default_prompt,
        )  # fmt: skip
        return cls(config=config, params=params, pooling=pooling, **fields | options)

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest input; None: no limit."""
        limits = [limit for limit in (self.max_tokens, self.config.max_positions) if limit is not None]
        return min(limits, default=None)

    @property
    def size(self) -> int:
        """The dimensions of an embedding, before `dim`."""
        return output_size(self.config, self.dense)

    def embed(self, inputs: Sequence[Input], *, dim: int | None = None, prompt: str | None = None) -> np.ndarray:
        """f32[N, dim]: the embedding of each input, in their order.

        dim: keep the first so many dimensions, before normalisation (Matryoshka). prompt: the name of a prompt of the
        folder; its text is put before each text. None: what the folder says, if it does.
        """
        if not _is_list(inputs) or not all(isinstance(each, str) or _is_list(each) for each in inputs):
            raise ValueError(
                f"inputs={short(inputs)} must have one text, or one list of token ids, for each embedding; put a "
                "single input in a list"
            )
        check_dim(dim, self.size)
        return self.finished(self.pooled([self.tokens_of(each, prompt) for each in inputs]), dim)

    def tokens_of(self, text: Input, prompt: str | None = None) -> list[int]:
        """The tokens of one input; ValueError if it has none, or too many, or ids outside the vocabulary."""
        name = self.default_prompt if prompt is None else prompt
        if name is not None and (not isinstance(name, str) or name not in self.prompts):
            raise ValueError(
                f"prompt={short(name)} must be one of {', '.join(self.prompts) or 'none: it has no prompts'}"
            )
        if isinstance(text, str):
            if self.tokenizer is None:
                raise ValueError("this embedder has no tokenizer; pass token ids, or make it with a tokenizer")
            whole = (self.prompts[name] if name is not None else "") + text
            tokens = encoded(self.tokenizer, whole.lower() if self.lower_case else whole)
        else:
            tokens = _token_ids(text, self.config.vocab_size)
        if not tokens:
            raise ValueError(f"the input {short(text)} has no tokens; it must have at least one")
        if self.max_length is not None and len(tokens) > self.max_length:
            raise ValueError(
                f"the input {short(text)} has {len(tokens)} tokens, and this model reads up to {self.max_length}; "
                "shorten it, because nothing is cut off"
            )
        return tokens

    def pooled(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """f32[N, size] of inputs that `tokens_of` has returned, before `finished`."""
        made = np.zeros((len(rows), self.size), np.float32)
        for at in _batches([len(row) for row in rows], self.max_batched_tokens):
            ids = np.concatenate([np.asarray(rows[index], np.int32) for index in at])
            lengths = [len(rows[index]) for index in at]
            made[at] = models.embed(
                self.config, self.params, ids, lengths, self.pooling, dense=self.dense, backend=self.backend
            )
        return made

    def finished(self, rows: np.ndarray, dim: int | None = None) -> np.ndarray:
        """The rows of `pooled`, cut to `dim` and normalised: on the host, where no `dim` needs a program of its own."""
        rows = rows[:, : self.dim if dim is None else dim]
        if not self.normalize:
            return rows
        return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)


def _is_list(value: Any) -> bool:
    return not isinstance(value, (str, *BYTES)) and (isinstance(value, Sequence) or np.ndim(value) > 0)


def _token_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """The ids as a list, checked."""
    found = list(ids)
    for id in found:
        if isinstance(id, bool) or not isinstance(id, int | np.integer) or not 0 <= id < vocab_size:
            raise ValueError(f"token id {short(id)} must be an integer from 0 to {vocab_size - 1}")
    return [int(id) for id in found]


def _batches(lengths: list[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of the inputs of each batch, longest first. A longer input than max_tokens is a batch of its own."""
    batch: list[int] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and total + lengths[index] > max_tokens:
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += lengths[index]
    if batch:
        yield batch
