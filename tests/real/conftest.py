"""What nodes keep is not in the cache folder of whoever runs these tests, where only what was fetched is."""

from __future__ import annotations

import os

import pytest

from caches import own_cache
from real import published  # which finds its folder before


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert published.FOLDER.is_absolute()
    os.environ["MDI_CACHE_DIR"] = own_cache(tmp_path_factory.mktemp("cache"))
