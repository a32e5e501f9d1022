"""`mdi`, and `python -m mdi`: the command line as a whole process, which Ctrl-C ends without a traceback from the first."""

from __future__ import annotations

from typing import NoReturn

INTERRUPTED = 130


def program() -> NoReturn:
    try:
        from mdi.cli import leave, main
    except KeyboardInterrupt:  # while libraries are imported: nothing has begun
        raise SystemExit(INTERRUPTED) from None
    leave(main())


if __name__ == "__main__":
    program()
