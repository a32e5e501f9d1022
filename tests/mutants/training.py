"""What training says while it runs, and that a resumed run goes on as if it had not stopped."""

from __future__ import annotations

from mutants.mutant import Mutant

LINES = "tests/test_training.py::test_no_ten_seconds_pass_without_a_line"

DROPPED = "tests/test_training.py::test_what_is_dropped_depends_on_seed_and_step_alone"

MUTANTS = [
    Mutant(
        "a slow step shows no passes",
        "ProgressLines.on_pass",
        "self._clock() - self._said_s >= SILENT_S",
        "False",
        LINES,
    ),
    Mutant(
        "steps that are no multiple of the log's interval show no loss",
        "ProgressLines.on_step",
        "self._clock() - self._step_said_s >= SILENT_S",
        "False",
        LINES,
    ),
    Mutant(
        "a line about a pass delays that of its step",
        "ProgressLines.on_step",
        "self._step_said_s",
        "self._said_s",
        LINES,
    ),
    Mutant(
        "steps between two reports are rows of the record",
        "Trainer.run",
        "(report if is_reported else on_step)(news)",
        "report(news)",
        "tests/test_training.py::test_each_pass_and_each_step_can_be_watched",
    ),
    Mutant(
        "Ctrl-C gets no answer before the step is finished",
        "StopRequest._note",
        "self._is_telling",
        "False",
        "tests/test_training_resume.py::test_a_request_to_stop_is_answered_at_once",
    ),
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
