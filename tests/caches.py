"""Cache folders of tests: nothing is kept in them but the compiled kernels, which need a minute of a core each time."""

from __future__ import annotations

from pathlib import Path

from mdi.files import default_cache_dir
from mdi.kernels import library


def own_cache(folder: Path) -> str:
    """A folder for MDI_CACHE_DIR that shares the kernels with all tests, and nothing else."""
    library.load()  # so that they are there
    folder.mkdir(parents=True, exist_ok=True)
    kernels = default_cache_dir() / "kernels"
    if kernels.is_dir() and not (folder / "kernels").exists():  # there are none without a compiler
        (folder / "kernels").symlink_to(kernels.resolve(), target_is_directory=True)
    return str(folder)
