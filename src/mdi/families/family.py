"""What a family says of itself.

A file of this package has one or more values of the class Family (one for each model_type of config.json), in a tuple
FAMILIES; `mdi.families.registry` has all of them. A file knows no other one: what several need is in `config_json` (words of
config.json), `names` (names of tensors) and `gguf` (files in GGUF).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mdi.families.config_json import Json, rope, sizes
from mdi.families.gguf import Gguf
from mdi.families.names import Names
from mdi.model.plain import ModelConfig


@dataclass(frozen=True)
class Family:
    """Models of one model_type.

    Attributes:
        model_type: as config.json has it.
        architecture: the class of transformers.
        read: of config.json with the usual words, without those that are null: settings of a ModelConfig, besides those that
            `sizes` and `rope` give. Raises KeyError, TypeError, ValueError, AttributeError.
        write: the way back, without "architectures" and "model_type". It may write what `read` makes another model of: that is
            compared. None if another family writes such models.
        names: of its tensors, for a model of the family.
        renamed: what its config.json calls otherwise -> the usual word.
        defaults: what its config.json may leave out.
        name_word: a word that names of its models have, because litgpt sees in it how norms are computed.
        has_one_matrix: whether embedding and head are always one.
        gguf: its files in GGUF; None if none are read.
        predicting_word: what says in config.json how many blocks predict further tokens.
        published: models that are known without their files, by their names on the hub: what of config.json says how large they
            are. Most of them are not in litgpt's table.
    """

    model_type: str
    architecture: str
    read: Callable[[Json], Json]
    write: Callable[[ModelConfig], Json] | None
    names: Callable[[ModelConfig], Names]
    renamed: Mapping[str, str] = field(default_factory=dict)
    defaults: Json = field(default_factory=dict)
    name_word: str | None = None
    has_one_matrix: bool = False
    gguf: Gguf | None = None
    predicting_word: str = "num_nextn_predict_layers"
    published: Mapping[str, Json] = field(default_factory=dict)

    def settings(self, hf: Json) -> Json:
        """Of a ModelConfig, without a name. Raises as `read`."""
        given = {self.renamed.get(key, key): value for key, value in hf.items() if value is not None}
        given = {**self.defaults, **given}
        by_name = {"norm_unit_offset": False, "norm_has_weight": True}  # of which litgpt's Config knows nothing
        return {**sizes(given), **rope(given), **by_name, **self.read(given)}

    def config_json(self, config: ModelConfig) -> Json:
        """Of a model that the family writes."""
        assert self.write is not None
        return {"architectures": [self.architecture], "model_type": self.model_type, **self.write(config)}
