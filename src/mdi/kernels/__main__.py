"""Compiles the kernels into the cache folder, as their first use does: `python -m mdi.kernels`.

With --selftest it compiles the program that tries each of them and prints checksums; CXX may be a cross compiler then.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mdi.errors import MdiError
from mdi.kernels import build, library


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mdi.kernels", description=__doc__)
    parser.add_argument("--selftest", type=Path, metavar="FILE", help="compile the test program instead, as FILE")
    parser.add_argument("--sanitize", metavar="NAMES", help="... that looks for: address,undefined or thread")
    parser.add_argument("--static", action="store_true", help="... that needs no library to run")
    args = parser.parse_args()
    try:
        if args.selftest is None:
            print(library.find_library())
        else:
            flags = build.sanitizing(args.sanitize) if args.sanitize else build.OPTIMIZED
            link_flags = ["-static"] if args.static else []
            build.compile_selftest(build.find_compiler(), args.selftest, build.CSRC, flags, link_flags)
    except MdiError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
