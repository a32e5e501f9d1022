"""What attention has to read and to multiply, counted by hand."""

import pytest

from mdi.model.caches import PAGE
from mdi.model.plain import ModelConfig
from random_checkpoint import config_of
from stage_profile import attention_work


@pytest.mark.parametrize("cache_type, size, scales", [("float32", 4, 0), ("bf16", 2, 0), ("int8", 1, 2 * 4)])
def test_attention_reads_the_pages_of_all_texts_and_multiplies_twice(cache_type: str, size: int, scales: int) -> None:
    config = ModelConfig.from_litgpt(config_of("tiny-1m"))  # 8 heads and 2 groups of 16 numbers
    n_bytes, n_operations = attention_work(config, cache_type, 3, 2 * PAGE)
    assert n_bytes == 3 * 2 * PAGE * 2 * (2 * 16 * size + scales)
    assert n_operations == 3 * 2 * PAGE * 8 * 16 * 2 * 2
    assert attention_work(config, cache_type, 3, PAGE + 1)[0] == n_bytes  # a page that was begun counts whole
