"""What config.json of a family means, and what the configuration of a model says."""

from __future__ import annotations

from mutants.mutant import Mutant

FORMS = "tests/test_hfconfig.py"
CONFIG = "tests/test_model_config.py"
NORMS = f"{CONFIG}::test_norms_are_those_of_the_fields_whatever_the_name_is"

MUTANTS = [
    Mutant(
        "transformers 5's name for the number of experts is not known",
        "checkpoint.hfconfig:_qwen3_moe",
        'hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"]',
        'hf["num_experts"]',
        FORMS,
    ),
    Mutant(
        "Gemma 2's soft cap of the logits is missing",
        "checkpoint.hfconfig:_gemma2",
        'hf["final_logit_softcapping"]',
        "None",
        FORMS,
    ),
    Mutant("OLMo 2 has a norm before its attention", "_olmo2", '"norm_1": False', '"norm_1": True', FORMS),
    Mutant("every layer of Gemma 3 has a window", "_windows", "(i + 1) % pattern", "True", FORMS),
    Mutant(
        "kernels look for Gemma in the name", "kernels.blocks:model_of", "config.norm_unit_offset", '"Gemma" in config.name',
        NORMS,
    ),
    Mutant(
        "shapes look for OLMo in the name", "checkpoint.shapes:_norm", "config.norm_has_weight", '"OLMo" not in config.name',
        NORMS,
    ),
    Mutant(
        "litgpt does not hear of norms", "ModelConfig.litgpt_plain",
        '"Gemma-" if self.norm_unit_offset else "" if self.norm_has_weight else "OLMo-"', '""', NORMS,
    ),
    Mutant("what the name says of norms is written", "ModelConfig.plain", "found[key] == value", "False", CONFIG),
    Mutant("dicts of a config can be changed", "_FrozenDict", " = update = ", " = ", CONFIG),
    Mutant("unknown fields are passed on", "ModelConfig.of", "key not in kinds", "False", CONFIG),
    Mutant("numbers of a plain form may be texts", "_check_kind", "if not is_right", "if False", CONFIG),
    Mutant(
        "a config of a message may lack fields", "decode_with_config", "name not in given and name not in left_out", "False",
        "tests/test_control.py::test_values_that_contradict_each_other",
    ),
]  # fmt: skip
