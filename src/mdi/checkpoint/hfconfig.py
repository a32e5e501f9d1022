"""From a Hugging Face config.json to a ModelConfig: one that its family derives, or litgpt's for a name; knows no weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any

from mdi.checkpoint.folder import model_name as model_folder_name
from mdi.checkpoint.litgpt_module import litgpt_module
from mdi.checkpoint.shapes import full_config
from mdi.errors import CheckpointError
from mdi.families.config_json import Json
from mdi.families.registry import FAMILIES, stated_family
from mdi.model.plain import NAME_WORDS, ModelConfig
from mdi.spec.settings_file import parse_json

# config.json's name for what litgpt's Config calls otherwise; a named Config must agree with those that are given
_SAME = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_query_groups",
    "head_dim": "head_size",
    "intermediate_size": "intermediate_size",
}
# What says where a token is, and which others it sees.
_POSITIONS = (
    "rope_base", "rope_condense_ratio", "rope_adjustments", "rope_interleave", "rope_local_base_freq", "rope_indices",
    "rotary_percentage", "sliding_window_size", "sliding_window_indices",
)  # fmt: skip
# In what a named Config may differ from the derived one, because it changes no number that is computed: names, and lengths.
_FREE = ("name", "hf_config", "padding_multiple", "vocab_size", "padded_vocab_size", "block_size")


def read_hf_config(path: Path, is_whole: bool = False) -> Json:
    """config.json; of a model that also sees or hears, its language part unless `is_whole`. Raises CheckpointError."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        data = parse_json(text)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        hint = (
            " (it begins as a web page does: was an error downloaded in its place?)"
            if text[:200].lstrip().startswith("<")
            else ""
        )
        raise CheckpointError(f"cannot read {path}: {e}{hint}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(data).__name__}")
    language = data.get("text_config")
    found = language if isinstance(language, dict) and not is_whole else data
    if not isinstance(found.get("model_type", ""), (str, NoneType)):
        raise CheckpointError(f"{path}: model_type: expected a word, found {_short(found['model_type'])}")
    return found


def n_predicting(hf: Json) -> int:
    """Blocks behind the model's own that predict several tokens (MTP), by config.json; nothing here computes them."""
    found = next((hf[key] for key in ("num_nextn_predict_layers", "num_mtp_modules") if hf.get(key) is not None), 0)
    return found if type(found) is int else 0


def choose_config(directory: Path, model_name: str | None = None) -> ModelConfig:
    """The configuration of a Hugging Face directory.

    Args:
        directory: with config.json.
        model_name: a name that litgpt knows; None derives the Config, and takes that of the directory's name in litgpt's table
            only where nothing can be derived of the model_type.

    Raises:
        CheckpointError: no such name, a name that contradicts config.json, or an architecture that is not supported.
    """
    where = directory / "config.json"
    hf = read_hf_config(where)
    name = model_folder_name(directory)
    candidates = [model_name] if model_name else [name, f"{directory.absolute().parent.name}/{name}"]
    config = next(filter(None, map(_named, candidates)), None)
    if model_name is None and stated_family(hf) is not None:
        # prompt styles go by litgpt's names
        return derive_config(hf, config.name if config else name, where)
    if config is not None:
        _check_agreement(hf, config, where)
        return config
    if model_name:
        raise CheckpointError(f"litgpt knows no model named {model_name!r}; without --model-name config.json is used")
    return derive_config(hf, name, where)


def _named(name: str) -> ModelConfig | None:
    """The entry of a model in litgpt's table; None if it is not there, or litgpt is not installed."""
    try:
        return full_config(asdict(litgpt_module("config").Config.from_name(name)), name)
    except (ValueError, ModuleNotFoundError):
        return None


def derive_config(hf: Json, name: str, where: Path) -> ModelConfig:
    """The configuration for what config.json describes; see `choose_config`."""
    family = stated_family(hf)
    if family is None:
        raise CheckpointError(
            f"{where}: no litgpt model is named {name!r}, and of model_type {hf.get('model_type')!r} its settings cannot be "
            f"derived (only of {', '.join(FAMILIES)}); give the litgpt name of the model with --model-name"
        )
    try:
        settings = family.settings(hf)
    except KeyError as e:
        raise CheckpointError(f"{where} lacks the field {e.args[0]!r}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise CheckpointError(f"{where} cannot be understood: {e}") from None
    return full_config({**settings, "name": _safe_name(name, family.name_word)}, str(where))


# Models that litgpt's table lacks, and those of the documents' plans, for who has no litgpt: name on the hub -> what of
# config.json says how large they are. A plan needs no more.
PUBLISHED: dict[str, Json] = {name: hf for family in FAMILIES.values() for name, hf in family.published.items()}


def published_config(name: str) -> ModelConfig | None:
    """The configuration of a model of `PUBLISHED`, by its name with its organisation or without; None if it is not there.

    Raises:
        CheckpointError: nothing here computes this model.
    """
    found = next((hub for hub in PUBLISHED if name in (hub, hub.partition("/")[2])), None)
    return None if found is None else derive_config(PUBLISHED[found], found.partition("/")[2], Path(found))


def _check_agreement(hf: Json, config: ModelConfig, where: Path) -> None:
    for theirs, ours in _SAME.items():
        found, expected = hf.get(theirs), getattr(config, ours)
        if theirs == "intermediate_size" and config.n_expert:
            continue  # of experts or of dense layers, depending on the family
        if found is not None and found != expected:
            raise CheckpointError(
                f"{where}: {theirs} is {found!r}, but {ours} of the litgpt model {config.name!r} is {expected!r}: "
                "give the right --model-name"
            )
    if stated_family(hf) is None:
        return
    derived = derive_config(hf, config.name, where)
    if differing := _differing(derived, config, [key for key in vars(config) if key not in _FREE]):
        raise CheckpointError(
            f"{where} has other settings than the litgpt model {config.name!r}: {', '.join(differing)}; without "
            "--model-name config.json is used"
        )


def other_positions(config: ModelConfig, where: Path) -> list[str]:
    """In words, the settings of positions of a checkpoint that are not those of its config.json; none if that says nothing.

    Args:
        config: of the checkpoint.
        where: of config.json.
    """
    try:
        hf = read_hf_config(where)
        derived = config if stated_family(hf) is None else derive_config(hf, config.name, where)
    except CheckpointError:  # it is not read for anything else
        return []
    return _differing(config, derived, _POSITIONS)


def _differing(config: ModelConfig, expected: ModelConfig, keys: Iterable[str]) -> list[str]:
    return [
        f"{key} is {_short(found)}, not {_short(other)}"
        for key in keys
        if (found := getattr(config, key)) != (other := getattr(expected, key))
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _safe_name(name: str, own: str | None) -> str:
    """The directory's name, such that litgpt sees a Gemma or an OLMo in it just if it is one.

    Args:
        own: the word that litgpt looks for in names of the model's family; None if there is none.
    """
    for word in NAME_WORDS:
        if word == own and word not in name:
            name = f"{word}-{name}"
        if word != own:
            name = name.replace(word, word.lower())
    return name
