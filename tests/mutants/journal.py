"""Mutants of the journal, from which an interrupted run goes on."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "a journal that lacks prompts goes on with fewer texts",
        "read_record",
        "len(record.texts) != n_prompts or _hash_of(record.texts) != prompts_hash",
        "False",
        "tests/test_journal.py::test_without_all_its_prompts_it_is_refused_and_left_alone",
    ),
    Mutant(
        "prompts in another order, or of another run, are taken",
        "read_record",
        " or _hash_of(record.texts) != prompts_hash",
        "",
        "tests/test_journal.py::test_without_all_its_prompts_it_is_refused_and_left_alone",
    ),
    Mutant(
        "records behind a damaged one are cut off without a word",
        "read_record",
        "any(fields is not None for fields in found[n_taken:])",
        "False",
        "tests/test_journal.py::test_damage_before_good_records_is_refused_and_left_alone",
    ),
    Mutant(
        "a damaged end is refused",
        "read_record",
        "any(fields is not None for fields in found[n_taken:])",
        "found[n_taken:]",
        "tests/test_journal.py::test_every_damaged_end_is_cut_off",
    ),
    Mutant(
        "a run without texts counts as finished",
        "RunRecord.has_ended",
        "bool(self.texts) and ",
        "",
        "tests/test_journal.py::test_a_run_without_texts_is_not_over",
    ),
    Mutant(
        "a damaged end stays in the file, and new records come behind it",
        "Journal.reopen",
        "os.ftruncate(file, record.n_bytes)",
        "None",
        "tests/test_journal.py::test_every_damaged_end_is_cut_off",
    ),
    Mutant(
        "a record whose checksum is wrong is taken",
        "run.journal:_fields_of",
        ' or check != b"%08x" % zlib.crc32(data)',
        "",
        "tests/test_journal.py::test_without_all_its_prompts_it_is_refused_and_left_alone",
    ),
    Mutant(
        "a damaged run is missing from the list",
        "describe_runs",
        "line = str(e)",
        "continue",
        "tests/test_journal.py::test_a_damaged_run_is_not_removed_by_trying_to_resume_it",
    ),
]
