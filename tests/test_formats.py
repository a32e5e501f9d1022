"""Weight formats: their error, their independence of company, and the plain fallback."""

from __future__ import annotations

import pytest
import torch

from families import FAMILIES, config_of, prompt, random_gpt
from mdi.errors import UsageError
from mdi.model import formats
from mdi.model.formats import Fp16Linear, Int8Linear, check_format, quantize_block
from test_stage import run_staggered, stages_of

WEIGHT = torch.randn(96, 200, generator=torch.Generator().manual_seed(0)) * 0.05
BIAS = torch.randn(96, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(8, 200, generator=torch.Generator().manual_seed(2))
OUTLIERS = torch.tensor([3, 77])


def planted() -> torch.Tensor:
    rows = ROWS.clone()
    rows[:, OUTLIERS] *= 30
    return rows


def error(layer: torch.nn.Module, rows: torch.Tensor) -> float:
    exact = rows.double() @ WEIGHT.double().T + BIAS.double()
    return float((layer(rows).double() - exact).norm() / exact.norm())


def test_errors_are_those_of_the_format() -> None:
    assert error(Fp16Linear(WEIGHT, BIAS), ROWS) < 5e-4
    assert error(Int8Linear(WEIGHT, BIAS), ROWS) < 0.02
    # Columns that are 30 times larger cost 8 bits their precision, unless they go beside.
    assert error(Int8Linear(WEIGHT, BIAS), planted()) > 0.02
    assert error(Int8Linear(WEIGHT, BIAS, OUTLIERS), planted()) < 0.02


@pytest.mark.parametrize("outliers", [None, OUTLIERS])
def test_the_fallback_gives_the_same_numbers(outliers: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = planted()
    packed16, packed8 = Fp16Linear(WEIGHT, BIAS)(rows), Int8Linear(WEIGHT, BIAS, outliers)(rows)
    monkeypatch.setattr(formats, "has_fbgemm", lambda: False)
    torch.testing.assert_close(Fp16Linear(WEIGHT, BIAS)(rows), packed16, atol=1e-3, rtol=1e-3)
    plain8 = Int8Linear(WEIGHT, BIAS, outliers)(rows)
    torch.testing.assert_close(plain8, packed8, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_a_row_does_not_depend_on_its_company(name: str) -> None:
    layer = formats.FORMATS[name](WEIGHT, BIAS, OUTLIERS)
    rows = planted()
    rows[3] *= 1000  # a neighbour that would coarsen a scale shared by all
    alone = torch.cat([layer(row[None]) for row in rows])
    torch.testing.assert_close(layer(rows), alone, atol=1e-4, rtol=1e-5)


def test_shapes_zero_rows_and_dtypes_are_kept() -> None:
    for layer in (Fp16Linear(WEIGHT, None), Int8Linear(WEIGHT, BIAS)):
        assert layer(torch.zeros(2, 3, 200)).shape == (2, 3, 96)
        assert layer(torch.zeros(1, 5, 200, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert torch.isfinite(layer(torch.zeros(4, 200))).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_every_family_keeps_its_answer(name: str, family: str) -> None:
    gpt = random_gpt(config_of(family), seed=3)
    texts = [prompt(40, 1), prompt(25, 2)]
    exact = run_staggered(stages_of(gpt, (2,)), texts, seed=1)
    stages = stages_of(gpt, (2,))
    for stage in stages:
        for block in stage.blocks:
            quantize_block(block, name)
    found = run_staggered(stages, texts, seed=1)
    # A token that is sent to another expert changes everything: of such models only most rows stay near.
    error = torch.cat([(f - e).norm(dim=-1) / e.norm(dim=-1) for f, e in zip(found, exact, strict=True)])
    assert error.median() < {"fp16": 0.005, "int8": 0.12}[name]


def test_planted_outliers_are_found_in_the_weights() -> None:
    gpt = random_gpt(config_of("Llama-3.1-8B"), seed=4)
    block = gpt.transformer.h[1]
    large = torch.tensor([7])
    block.norm_1.weight[large] *= 30
    block.attn.qkv.weight[:, large] /= 30
    block.mlp.fc_2.weight[large] *= 30
    block.mlp.proj.weight[:, large] /= 30
    found = formats._expected_outliers(block)
    assert found["attn.qkv"].tolist() == [7] and found["mlp.proj"].tolist() == [7]
    assert "mlp.fc_1" not in found


def test_unknown_formats_and_devices_are_refused() -> None:
    check_format(None, torch.device("cuda"))
    with pytest.raises(UsageError, match="expected fp16 or int8"):
        check_format("int3", torch.device("cpu"))
    with pytest.raises(UsageError, match="CPU"):
        check_format("int8", torch.device("cuda"))
