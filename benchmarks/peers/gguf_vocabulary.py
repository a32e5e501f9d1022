#!/usr/bin/env python3
"""A copy of a GGUF file with a made-up vocabulary: llama.cpp's server needs one even where prompts are token ids.

benchmarks/peers/gguf_vocabulary.py MODEL.gguf COPY.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter, TokenType

SPECIAL = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}


def tokens(n: int) -> list[tuple[str, TokenType]]:
    """As many as the model knows: the three special ones of Llama 2, a token for each byte, then words."""
    found = [*SPECIAL.items(), *((f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256))]
    return [*found, *((f"\u2581w{i}", TokenType.NORMAL) for i in range(len(found), n))]


def copy(source: Path, target: Path) -> None:
    reader = GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = GGUFWriter(target, str(fields.pop("general.architecture").contents()))
    for name, field in fields.items():
        if not name.startswith("tokenizer."):
            inner = field.types[1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    n_vocabulary = int(fields["llama.vocab_size"].contents())
    words, types = zip(*tokens(n_vocabulary), strict=True)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(words))
    writer.add_token_scores([-float(i) for i in range(n_vocabulary)])
    writer.add_token_types(list(types))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    copy(args.source, args.target)
