"""What a folder of the sentence-transformers library says about embeddings: pooling, normalisation, and prompts."""

import dataclasses
from pathlib import Path
from typing import Any

from jattn.errors import UnsupportedError
from jattn.errors.arguments import short
from jattn.models.config_reader import MAX_COUNT, ConfigReader
from jattn.models.files import is_there, read_any_json, read_json
from jattn.models.model_folder import path_of_folder

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
TEXT_SETTINGS_FILES = (
    "sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
    "sentence_camembert_config.json", "sentence_xlm-roberta_config.json",
)  # fmt: skip
"""The library's names of the file with the settings of the first module."""
ARGUMENTS = ("config_args", "config_kwargs", "model_args", "model_kwargs", "tokenizer_args", "processor_kwargs")
"""Keys with arguments that the library gives to transformers; three things, each by its old and its new name."""
HARMLESS = ("add_pooling_layer", "device_map", "low_cpu_mem_usage", "use_safetensors", "padding_side", "use_fast")
"""Those arguments that have no effect here, besides keys that have none in a config.json."""
POOLING_NAMES = {
    "cls": ("cls_token", "cls"), "mean": ("mean_tokens", "mean"), "last": ("lasttoken", "lasttoken"),
    "max": ("max_tokens", "max"), "weighted_mean": ("weightedmean_tokens", "weightedmean"),
    "mean_sqrt_len": ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
}  # fmt: skip
"""Our pooling -> NAME of its flag pooling_mode_NAME, and its value of the newer key pooling_mode."""
LIBRARY = "sentence_transformers."
"""The beginning of the names of the library's own classes. Others are code of the folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceFolder:
    """How texts become embeddings. The defaults are those of a folder without modules.json."""

    model: Path  # the folder with config.json and *.safetensors
    pooling: str | None = None
    dense: tuple[Path, ...] = ()  # the folders of its Dense modules, in order
    normalize: bool = False
    max_tokens: int | None = None  # of a text; None: the model's own limit
    lower_case: bool = False  # texts are converted to lower case first
    prompts: tuple[tuple[str, str], ...] = ()  # (name, the text before an input)
    default_prompt: str | None = None  # a name in `prompts`
    dim: int | None = None  # dimensions that are kept; None: all


def is_sentence_folder(directory: str | Path) -> bool:
    """True if the folder is of the sentence-transformers library."""
    return is_there(Path(directory) / MODULES)


def read_sentence_folder(directory: str | Path) -> SentenceFolder:
    """The settings in modules.json and the files that it names; UnsupportedError for a module that is not known."""
    folder = path_of_folder(directory)
    if not is_sentence_folder(folder):
        return SentenceFolder(model=folder)
    modules = _modules(folder / MODULES)
    kinds = [kind for kind, _ in modules]
    dense = [folder / path for kind, path in modules if kind == "Dense"]
    first, rest = kinds[: 2 + len(dense)], kinds[2 + len(dense) :]
    if first != ["Transformer", "Pooling", *["Dense"] * len(dense)] or set(rest) - {"Normalize"}:
        raise UnsupportedError(
            f"{folder / MODULES} has the modules {', '.join(kinds) or '(none)'}; supported are Transformer, Pooling "
            "and, after them, Dense and Normalize"
        )
    for _, path in modules[2 + len(dense) :]:
        _check_normalisation(folder / path / "config.json")
    model, pooling = (folder / path for _, path in modules[:2])
    return SentenceFolder(
        model=model, pooling=_pooling(pooling / "config.json"), dense=tuple(dense), normalize=bool(rest),
        **_text_settings(model), **_prompts(folder / SETTINGS),
    )  # fmt: skip


def _is_name(where: str) -> bool:
    """A folder in this folder; "": this folder."""
    return Path(where).name == where and where != ".." and len(where) < 256 and "\0" not in where


def _modules(path: Path) -> list[tuple[str, str]]:
    """(kind, folder) of each module, in order. The kind is the last part of the name of its class."""
    modules, found = read_any_json(path), []
    for module in modules if isinstance(modules, list) else [None]:
        kind, where = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(where, str) or not _is_name(where):
            raise ValueError(
                f"{path} must be a list of objects with the class of a module, 'type', and the name of its folder, "
                f"'path', not {short(module if isinstance(modules, list) else modules)}"
            )
        if not kind.startswith(LIBRARY):
            raise UnsupportedError(
                f"{path} has a module of the class {short(kind)}, which is code of its folder and never run; supported "
                f"are classes of {LIBRARY.removesuffix('.')}"
            )
        found.append((kind.rpartition(".")[2], where))
    return found


def _pooling(path: Path) -> str:
    c = ConfigReader(read_json(path), str(path))
    c.ignore("word_embedding_dimension", "embedding_dimension")
    found = [ours for ours, (flag, _) in POOLING_NAMES.items() if c.flag(f"pooling_mode_{flag}", False)]
    mode = c.choice("pooling_mode", [name for _, name in POOLING_NAMES.values()], None)
    if found != ["last"] and mode != "lasttoken":
        c.only("include_prompt", True)  # the last token is not of the prompt
    c.ignore("include_prompt")
    c.refuse_unread()
    found += [ours for ours, (_, name) in POOLING_NAMES.items() if name == mode and ours not in found]
    if len(found) != 1:
        raise UnsupportedError(f"{path} asks for {len(found)} poolings ({', '.join(found)}); one is supported")
    return found[0]


def _check_normalisation(path: Path) -> None:
    """UnsupportedError if a Normalize module is of other vectors than the pooled ones. Older ones have no settings."""
    if not is_there(path):
        return
    c = ConfigReader(read_json(path), str(path))
    for name in ("module_input_name", "module_output_name"):
        c.only(name, "sentence_embedding")
    c.refuse_unread()


def _text_settings(model: Path) -> dict[str, Any]:
    path = next((model / name for name in TEXT_SETTINGS_FILES if is_there(model / name)), None)
    c = ConfigReader({} if path is None else read_json(path), str(path))
    c.only("transformer_task", "feature-extraction")
    c.only("module_output_name", "token_embeddings")
    for name in ("query_length", "document_length", "query_expansion"):  # of models with a vector for each token
        c.only(name)
    c.only("processing_kwargs", {})
    inputs = c.section("modality_config")
    inputs.only("message")  # texts would be rendered as chats
    inputs.section("text").only_these(dict(method="forward", method_output_name="last_hidden_state"))
    lower, most = c.flag("do_lower_case", False), c.count("max_seq_length", None)
    for name in ARGUMENTS:
        section = c.section(name)
        most = section.count("model_max_length", most)
        section.ignore(*HARMLESS)
        section.refuse_unread()
    c.ignore("unpad_inputs")
    c.refuse_unread()
    return dict(max_tokens=_tokenizer_limit(model) if most is None else most, lower_case=lower)


def _tokenizer_limit(model: Path) -> int | None:
    """model_max_length of the tokenizer, where the library saves the longest text; None: no limit, stored as 1e30."""
    path = model / "tokenizer_config.json"
    found = read_json(path).get("model_max_length") if is_there(path) else None
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or found < 1:
        raise ValueError(f"{path}: model_max_length={short(found)} must be a number of tokens, at least 1")
    return int(found) if found <= MAX_COUNT else None


def _prompts(path: Path) -> dict[str, Any]:
    if not is_there(path):
        return {}
    c = ConfigReader(read_json(path), str(path))
    prompts = {name: text for name, text in c.section("prompts").given.items() if text is not None}
    default = c.get("default_prompt_name")
    if not all(isinstance(text, str) for text in prompts.values()):
        c.refuse("prompts", "must be an object of texts")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        c.refuse("default_prompt_name", f"must be one of {', '.join(prompts)}")
    c.only("model_type", "SentenceTransformer")  # others give sparse vectors, a vector for each token, or scores
    c.ignore("__version__", "similarity_fn_name")
    dim = c.count("truncate_dim", None)
    c.refuse_unread()
    return dict(prompts=tuple(prompts.items()), default_prompt=default, dim=dim)
