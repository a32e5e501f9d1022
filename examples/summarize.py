#!/usr/bin/env python3
"""Summarizes files through the API, several at once: a ring computes several texts at the same time, one node each."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from api import chat, parser


def main() -> None:
    p = parser(__doc__)
    p.add_argument("files", nargs="+", type=Path)
    p.add_argument("--at-once", type=int, default=4, help="requests in flight (%(default)s)")
    p.add_argument("--characters", type=int, default=6000, help="of each file's beginning (%(default)s)")
    args = p.parse_args()

    def summary(path: Path) -> str:
        text = path.read_text(encoding="utf-8", errors="replace")[: args.characters]
        messages = [{"role": "user", "content": f"Summarize this text in two sentences:\n\n{text}"}]
        return chat(args.server, messages, max_tokens=args.max_tokens)["content"] or ""

    with ThreadPoolExecutor(args.at_once) as pool:
        for path, text in zip(args.files, pool.map(summary, args.files), strict=True):
            print(f"{path}: {text.strip()}", flush=True)


if __name__ == "__main__":
    main()
