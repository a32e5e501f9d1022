"""--resume: continues a run whose starter ended, with every unfinished text; and the journal for that."""

from __future__ import annotations

import argparse
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.errors import UsageError

if TYPE_CHECKING:
    from mdi.run.journal import JournalText, RunRecord
    from mdi.run.run import Run

# Flags that are those of this command, whatever the run was started with.
OWN = (
    "resume", "run_dir", "no_journal", "json", "no_stream", "plots", "time_run", "trace", "key", "insecure", "wait",
    "stop_nodes", "verb", "debug", "quiet",
)  # fmt: skip

logger = logging.getLogger("mdi")


def add_resume_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("going on with a run")
    group.add_argument(
        "--resume", nargs="?", const="", metavar="RUN", help="continue an interrupted run, named here or `last`, with its "
        "flags and prompts; --nodes-config may be given again; without a name, list such runs",
    )  # fmt: skip
    group.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder for the journals of runs, readable by you only (default: runs/ in "
        "the cache folder)",
    )  # fmt: skip
    group.add_argument("--no-journal", action="store_true", help="write no journal; such a run cannot be resumed")


def run_folder(args: argparse.Namespace) -> Path:
    from mdi.cache_dir import default_cache_dir

    return args.run_dir if args.run_dir is not None else default_cache_dir() / "runs"


class Journaling:
    """The journal of a run of the starter, from its flags to its end.

    Args:
        args: of the command; with --resume, the flags of the resumed run are written into it.

    Raises:
        UsageError: the run does not exist, or another process has resumed it.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        from mdi.run.journal import Journal, find_run

        self._folder = run_folder(args)
        self._journal: Journal | None = None
        self._record: RunRecord | None = None
        if args.resume:
            self._journal, self._record = Journal.reopen(find_run(self._folder, args.resume))
            _restore(args, self._record.flags)

    @property
    def texts(self) -> list[JournalText] | None:
        """The record of the resumed run; None if this is a new one."""
        return None if self._record is None else self._record.texts

    def begin(self, args: argparse.Namespace, session: Run, prompts: list[str]) -> None:
        """From here on generated tokens are recorded. UsageError if the run began with something else."""
        from mdi.run.journal import Journal, JournalText, RunRecord, new_run
        from mdi.run.records import MAY_DIFFER

        if self._journal is None:
            texts = [JournalText(*pair) for pair in zip(prompts, session.prompt_ids, strict=True)]
            flags = {**_saved(args), "quantize": session.model.formats[0], "quantize_head": session.model.formats[1]}
            self._journal = Journal.new(
                new_run(self._folder), RunRecord(flags, session.identity, texts, numbers=session.numbers)
            )
        else:
            assert self._record is not None
            if session.identity != self._record.identity:
                raise UsageError(
                    f"{self._journal.path.parent.name} was begun with another model or other options, which "
                    "would change its texts: begin a new run"
                )
            left = [text for text in self._record.texts if text.finish_reason is None]
            logger.info("continuing %d of %d texts", len(left), len(self._record.texts))
            if left and session.numbers != self._record.numbers:
                logger.warning("warning: %s", MAY_DIFFER)
                for text in left:
                    known = text.may_differ_from
                    text.may_differ_from = len(text.ids) if known is None else min(known, len(text.ids))
        journal = self._journal

        def record(index: int, tokens: list[int], reason: str | None) -> None:
            is_new = index == len(session.samples)  # an earlier run has ended it
            journal.add(index, tokens, reason, None if is_new else session.may_differ_from(session.samples[index]))

        session.record_to(record)

    def close(self) -> None:
        """Harmless if repeated. A run whose texts have all ended leaves nothing behind."""
        from mdi.run.journal import read_record, remove_run

        journal, self._journal = self._journal, None
        if journal is None:
            return
        journal.close()
        with contextlib.suppress(UsageError):
            if read_record(journal.path).is_over:
                return remove_run(journal.path)
        logger.info("to continue this run: starter.py --resume %s", journal.path.parent.name)


def list_runs(args: argparse.Namespace) -> None:
    from mdi.run.journal import told_runs
    from mdi.terminal import show

    lines = told_runs(run_folder(args))
    show("\n".join(lines) if lines else f"no run in {run_folder(args)} was interrupted")


def _saved(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of a run as JSON; files by their whole names."""
    return {
        name: {"path": str(value.expanduser().absolute())} if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in OWN
    }


def _restore(args: argparse.Namespace, flags: dict[str, Any]) -> None:
    for name, value in flags.items():
        if name in OWN or (name == "nodes_config" and args.nodes_config is not None):
            continue
        if isinstance(value, dict):
            value = Path(str(value.get("path")))
        setattr(args, name, value)
