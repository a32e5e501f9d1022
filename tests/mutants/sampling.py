"""Drawing tokens."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "the best token is drawn last",
        "best_of",
        "np.argsort(-values, axis=1",
        "np.argsort(values, axis=1",
        "tests/test_sampling.py",
    ),
    Mutant(
        "the presence penalty is not applied",
        "_adjust",
        "np.float32(params.presence_penalty) * (counts > 0)",
        "0 * (counts > 0)",
        "tests/test_sampling.py",
    ),
]
