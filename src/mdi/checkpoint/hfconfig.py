"""From a Hugging Face config.json to a litgpt Config: litgpt's own for that name, or a derived one.

Knows no weights. What is derived of which architecture is in hffamilies.py.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from mdi.checkpoint.hffamilies import DERIVED, Json, derive
from mdi.checkpoint.shapes import full_config
from mdi.errors import CheckpointError
from mdi.settings_file import parse_json

# config.json's name for what litgpt's Config calls otherwise; a named Config must agree with those that are given
_SAME = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_query_groups",
    "head_dim": "head_size",
    "intermediate_size": "intermediate_size",
}


def read_hf_config(path: Path) -> Json:
    """config.json; of a model that also sees or hears, its language part. Raises CheckpointError."""
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
    return language if isinstance(language, dict) else data


def choose_config(directory: Path, model_name: str | None) -> tuple[Json, str | None]:
    """The litgpt Config for a Hugging Face directory, and the model_type that it was derived from, if it was.

    Args:
        directory: with config.json.
        model_name: a name that litgpt knows, or None for the directory's name, then config.json.

    Raises:
        CheckpointError: no such name, a name that contradicts config.json, or an architecture that is not supported.
    """
    from litgpt.config import Config

    where = directory / "config.json"
    hf = read_hf_config(where)
    name = directory.absolute().name
    for candidate in [model_name] if model_name else [name, f"{directory.absolute().parent.name}/{name}"]:
        try:
            config = full_config(asdict(Config.from_name(candidate)), candidate)
        except ValueError:
            continue
        _check_agreement(hf, config, where)
        return config, None
    if model_name:
        raise CheckpointError(f"litgpt knows no model named {model_name!r}; without --model-name config.json is used")
    return derive_config(hf, name, where), str(hf.get("model_type"))


def derive_config(hf: Json, name: str, where: Path) -> Json:
    """A litgpt Config for what config.json describes; see `choose_config`."""
    model_type = hf.get("model_type")
    if model_type not in DERIVED:
        raise CheckpointError(
            f"{where}: no litgpt model is named {name!r}, and of model_type {model_type!r} its settings cannot be derived "
            f"(only of {', '.join(DERIVED)}); give the litgpt name of the model with --model-name"
        )
    try:
        settings = derive(hf)
    except KeyError as e:
        raise CheckpointError(f"{where} lacks the field {e.args[0]!r}") from None
    except (TypeError, ValueError, AttributeError) as e:
        raise CheckpointError(f"{where} cannot be understood: {e}") from None
    settings["name"] = _safe_name(name, str(model_type))
    return full_config(settings, str(where))


def _check_agreement(hf: Json, config: Json, where: Path) -> None:
    for theirs, ours in _SAME.items():
        found, expected = hf.get(theirs), config[ours]
        if theirs == "intermediate_size" and config["mlp_class_name"] == "LLaMAMoE":
            continue  # of experts or of dense layers, depending on the family
        if found is not None and found != expected:
            raise CheckpointError(
                f"{where}: {theirs} is {found!r}, but {ours} of the litgpt model {config['name']!r} is {expected!r}: "
                "give the right --model-name"
            )


def _safe_name(name: str, model_type: str) -> str:
    """The directory's name, such that litgpt sees a Gemma or an OLMo in it just if it is one."""
    for word, model_types in (("Gemma", ("gemma", "gemma2", "gemma3_text")), ("OLMo", ("olmo", "olmo2"))):
        if model_type in model_types and word not in name:
            name = f"{word}-{name}"
        if model_type not in model_types:
            name = name.replace(word, word.lower())
    return name
