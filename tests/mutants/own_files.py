"""Mutants of what removes or replaces files of the user."""

from __future__ import annotations

from mutants.mutant import Mutant

REMOVED = "tests/serve/test_serve_models.py::test_what_is_more_than_the_named_model_is_not_removed"

MUTANTS = [
    Mutant("a model is removed with the models in its folder", "_check_alone", "if inside", "if False", REMOVED),
    Mutant(
        "the folder of all models is removed",
        "_check_alone",
        "folder.resolve() == home.resolve()",
        "False",
        "tests/serve/test_serve_models.py::test_the_folder_of_all_models_is_not_removed_as_a_model",
    ),
    Mutant(
        "a model behind a link to its folder's parent is removed",
        "_check_alone",
        "(folder, *folder.parents[: len(folder.relative_to(home).parts) - 1])",
        "(folder,)",
        REMOVED,
    ),
    Mutant(
        "no model can be removed if the folder of the models is a link",
        "_check_alone",
        "folder.parents[: len(folder.relative_to(home).parts) - 1]",
        "folder.parents",
        "tests/serve/test_serve_models.py::test_a_model_in_a_folder_that_is_reached_by_a_link_is_removed",
    ),
    Mutant(
        "joining a cluster writes over the key of another one",
        "cli.join:fetch",
        "path.exists()",
        "False",
        "tests/security/test_join.py::test_the_key_of_another_cluster_is_kept",
    ),
    Mutant(
        "a conversion that failed leaves the folder that it made",
        "_nothing_left",
        "shutil.rmtree(folder, ignore_errors=True)",
        "pass",
        "tests/test_prepare.py::test_a_model_that_cannot_be_converted_leaves_nothing_in_the_way",
    ),
    Mutant(
        "a conversion that failed leaves its files in a folder that was there",
        "_nothing_left",
        "path.unlink()",
        "pass",
        "tests/test_prepare.py::test_a_model_that_cannot_be_converted_leaves_nothing_in_the_way",
    ),
    Mutant(
        "a conversion that failed removes an earlier result",
        "_nothing_left",
        "set(folder.iterdir()) - before",
        "set(folder.iterdir())",
        "tests/test_prepare.py::test_an_earlier_result_survives_a_conversion_that_fails",
    ),
    Mutant(
        "a head that is the embedding is written twice",
        "convert:_write",
        "name == HEAD and is_tied",
        "False",
        "tests/test_prepare.py::test_every_derived_family",
    ),
    Mutant(
        "converting keeps the files mapped",
        "convert:_write",
        "source.release()",
        "None",
        "tests/test_prepare.py::test_the_model_is_never_in_memory_as_a_whole",
    ),
    Mutant(
        "positions of litgpt's table are not told",
        "LitCheckpoint.__init__",
        'other_positions(self.config, self.path / "config.json")',
        "[]",
        "tests/test_prepare.py::test_positions_that_an_older_version_took_from_litgpts_table",
    ),
]
