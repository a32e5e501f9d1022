"""What config.json of a family means."""

from __future__ import annotations

from mutants.mutant import Mutant

FORMS = "tests/test_hfconfig.py"

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
]
