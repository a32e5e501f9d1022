"""Training that is resumed goes on as if it had not stopped."""

from __future__ import annotations

from mutants.mutant import Mutant

DROPPED = "tests/test_training.py::test_what_is_dropped_depends_on_seed_and_step_alone"

MUTANTS = [
    Mutant(
        "what is dropped is not seeded",
        "Trainer._dropout_of_step",
        "torch.manual_seed((self.settings.seed * 1_000_003 + n) % (1 << 63))",
        "pass",
        DROPPED,
    ),
    Mutant(
        "the same is dropped in every step",
        "Trainer._dropout_of_step",
        "self.progress.n_steps * self._processes.count + self._processes.rank",
        "0",
        DROPPED,
    ),
    Mutant(
        "another seed drops the same",
        "Trainer._dropout_of_step",
        "self.settings.seed * 1_000_003",
        "1_000_003",
        DROPPED,
    ),
    Mutant(
        "a step changes the random numbers of others",
        "Trainer._dropout_of_step",
        "torch.random.fork_rng(devices=devices)",
        "nullcontext()",
        DROPPED,
    ),
]
