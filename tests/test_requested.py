"""What nodes are asked to compute with, from flags to a node."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import pytest

from mdi.cli import options_of, parser_of, starter
from mdi.errors import ControlError
from mdi.spec.decode import decode
from mdi.spec.options import ANYTHING, Requested, StarterOptions

ASKED = Requested(device="cuda:1", threads=2, quantize="int8", wire_dtype="fp16", compile=True)


def read(values: object) -> Requested:
    return decode(Requested, values, "request", lambda message: ControlError(message, 400))


def test_every_field_has_a_flag_and_travels() -> None:
    parser = parser_of(starter)
    args = parser.parse_args(
        ["--device", "cuda:1", "--threads", "2", "--quantize", "int8", "--wire-dtype", "fp16", "-c"]
    )
    assert options_of(parser, parser.parse_args(["--allow-clipping"])).allow_clipping is True
    assert {f.name for f in fields(Requested)} - vars(args).keys() == {"n_spans", "cache_share", "keep_prefixes"}, (
        "which follow from others, or are the server's"
    )
    assert Requested.of(options_of(parser, args)) == ASKED
    assert Requested.of(StarterOptions(**vars(ASKED))) == ASKED == read(asdict(ASKED))


def test_what_a_node_was_started_with_goes_first() -> None:
    own = Requested(device="cpu", dtype="float32")
    assert own.over(ASKED) == Requested(
        device="cpu", dtype="float32", threads=2, quantize="int8", wire_dtype="fp16", compile=True
    )
    assert own.over(
        replace(ASKED, allow_clipping=True)
    ).allow_clipping  # a node that was not asked leaves it to the starter
    assert ANYTHING.over(ASKED) == ASKED == ASKED.over(ANYTHING)


@pytest.mark.parametrize(
    "changes", [{"threads": 0}, {"wire_dtype": "int3"}, {"compile": 1}, {"dtype": 5}, {"wire_dtype": None}]
)
def test_a_request_is_checked(changes: dict[str, object]) -> None:
    with pytest.raises(ControlError) as failure:
        read({**asdict(ASKED), **changes})
    assert failure.value.code == "control"
