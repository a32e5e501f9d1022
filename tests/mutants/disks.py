"""Weights on disks: read errors, and parts that several runs use."""

from __future__ import annotations

from mutants.mutant import Mutant

STORE, SPACE = "tests/test_checkpoint_store.py", "tests/test_transfer.py"

MUTANTS = [
    Mutant(
        "a part counts as missing when the process may open no more files",
        "BlockStore.has",
        "e.errno in _SHORT",
        "False",
        f"{STORE}::test_a_process_that_is_short_of_something_says_nothing_of_the_file",
    ),
    Mutant(
        "a part that the disk cannot read is removed",
        "BlockStore.has",
        "path, e.strerror or e)\n            return False",
        "path, e.strerror or e)",
        f"{STORE}::test_a_part_that_the_disk_cannot_read_stays_until_it_has_come_again",
    ),
    Mutant(
        "using a part looks like writing to its file",
        "BlockStore.part",
        "path.stat().st_mtime_ns",
        "time.time_ns()",
        f"{STORE}::test_using_a_part_does_not_look_like_writing_to_it",
    ),
    Mutant(
        "parts that were used are not kept longer",
        "BlockStore._files",
        "max(status.st_atime, status.st_mtime)",
        "status.st_mtime",
        f"{STORE}::test_a_part_that_was_used_stays_longer",
    ),
    Mutant(
        "space is made of parts that other runs need",
        "BlockStore._free_space",
        "self._coming.union(*self._in_use)",
        "self._coming",
        f"{SPACE}::test_what_other_runs_need_is_not_removed",
    ),
    Mutant(
        "space is made of a part that is being received",
        "BlockStore._free_space",
        "self._coming.union(*self._in_use)",
        "set().union(*self._in_use)",
        f"{SPACE}::test_space_is_made_beside_a_part_that_is_being_received",
    ),
    Mutant(
        "who has finished with a part takes it from others who have not",
        "BlockStore.in_use",
        "if one is shas",
        "if one is not None",
        f"{SPACE}::test_what_other_runs_need_is_not_removed",
    ),
    Mutant(
        "a run does not say which parts it loads",
        "RingWorker._have_stage",
        "self._weights.store.in_use({part.sha256 for part in self.request.parts})",
        "self._weights.store.in_use(set())",
        f"{SPACE}::test_the_parts_of_a_run_stay_until_it_has_loaded_them",
    ),
    Mutant(
        "a packed part may be removed before it is loaded",
        "KeptPacked._make",
        "keep.add(info.sha256)",
        "keep.add(info.name)",
        "tests/test_kept_packed.py::test_another_run_does_not_remove_it_before_it_is_loaded",
    ),
    Mutant(
        "a stage whose weights could not be read is kept",
        "StageStore.release",
        "held.stage is None or is_failed",
        "held.stage is None",
        "tests/stages/test_store.py::test_a_stage_that_has_failed_is_given_to_nobody",
    ),
    Mutant(
        "a node gives a stage that failed to the next ring",
        "RingWorker._run",
        "self.has_begun and not isinstance(e, RingError | AbandonedError)",
        "False",
        "tests/recovery/test_failed_nodes.py::test_a_stage_whose_weights_could_not_be_read_is_built_again",
    ),
    Mutant(
        "a window's reader does not try again",
        "Reader._wait_for",
        "self._error = None",
        "pass",
        "tests/window/test_window_faults.py::test_a_disk_that_failed_once_is_read_again",
    ),
]
