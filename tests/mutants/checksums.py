"""Mutants of how damage in files of weights is found."""

from __future__ import annotations

from mutants.mutant import Mutant

SOURCE = "tests/test_checkpoint_source.py"

MUTANTS = [
    Mutant(
        "flipped bits of lit_model.pth are read",
        "PickledFile.array",
        "(data.nbytes, zlib.crc32(data.data)) not in self._checksums",
        "False",
        f"{SOURCE}::test_a_flipped_bit_of_a_checkpoint_is_found",
    ),
    Mutant(
        "only the tensor's own bytes of a storage are compared",
        "storage_bytes",
        "tensor.untyped_storage()",
        "tensor.flatten()[:1].clone().untyped_storage()",
        f"{SOURCE}::test_a_checkpoint",
    ),
    Mutant(
        "after the first tensor none is compared",
        "PickledFile.array",
        "name not in self._checked",
        "not self._checked",
        f"{SOURCE}::test_a_flipped_bit_of_a_checkpoint_is_found",
    ),
    Mutant(
        "a file without checksums counts as damaged",
        "_checksums",
        "found if any(crc for _, crc in found) else set()",
        "found",
        f"{SOURCE}::test_a_checkpoint_without_checksums_can_be_read",
    ),
    Mutant(
        "a file of the older format counts as damaged",
        "_checksums",
        "not zipfile.is_zipfile(path)",
        "False",
        f"{SOURCE}::test_a_checkpoint_without_checksums_can_be_read",
    ),
]
