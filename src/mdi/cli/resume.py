"""--resume: continues a run whose starter ended, with every unfinished text; and the journal for that."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.errors import UsageError
from mdi.spec.options import Options

if TYPE_CHECKING:
    from mdi.run.journal import JournalText, RunRecord
    from mdi.run.run import Run

# Flags that are those of this command, whatever the run was started with.
OWN = (
    "resume", "run_dir", "no_journal", "json", "no_stream", "plots", "time_run", "trace", "key", "insecure", "wait",
    "stop_nodes", "verb", "debug", "quiet",
)  # fmt: skip

logger = logging.getLogger("mdi")


def run_folder(options: Options) -> Path:
    from mdi.files import default_cache_dir

    return options.run_dir if options.run_dir is not None else default_cache_dir() / "runs"


class Journaling:
    """The journal of a run of the starter, from its flags to its end.

    Args:
        options: of the command.

    Attributes:
        options: those, with the flags of the resumed run.

    Raises:
        UsageError: the run does not exist, or another process has resumed it.
    """

    def __init__(self, options: Options) -> None:
        from mdi.run.journal import Journal, find_run

        self.options = options
        self._folder = run_folder(options)
        self._journal: Journal | None = None
        self._record: RunRecord | None = None
        if options.resume:
            self._journal, self._record = Journal.reopen(find_run(self._folder, options.resume))
            self.options = _restored(options, self._record.flags)

    @property
    def texts(self) -> list[JournalText] | None:
        """The record of the resumed run; None if this is a new one."""
        return None if self._record is None else self._record.texts

    def begin(self, options: Options, session: Run, prompts: list[str]) -> None:
        """From here on generated tokens are recorded. UsageError if the run began with something else."""
        from mdi.run.journal import Journal, JournalText, RunRecord, new_run
        from mdi.run.report import MAY_DIFFER

        if self._journal is None:
            texts = [JournalText(*pair) for pair in zip(prompts, session.prompt_ids, strict=True)]
            flags = {**_saved(options), "quantize": session.model.formats[0], "quantize_head": session.model.formats[1]}
            self._journal = Journal.new(
                new_run(self._folder), RunRecord(flags, session.identity, texts, numbers=session.arithmetic.sha256)
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
            if left and session.arithmetic.sha256 != self._record.numbers:
                logger.warning("warning: %s", MAY_DIFFER)
                for text in left:
                    known = text.may_differ_from
                    text.may_differ_from = len(text.ids) if known is None else min(known, len(text.ids))
        journal = self._journal

        def record(index: int, tokens: list[int], reason: str | None, is_anew: bool) -> None:
            is_new = index == len(session.samples)  # an earlier run has ended it
            differs = None if is_new else session.may_differ_from(session.samples[index])
            journal.add(index, tokens, reason, differs, is_anew)

        session.record_to(record)

    def close(self) -> None:
        """Harmless if repeated. A run whose texts have all ended leaves nothing behind."""
        from mdi.run.journal import read_record, remove_run

        journal, self._journal = self._journal, None
        if journal is None:
            return
        journal.close()
        with contextlib.suppress(UsageError):
            if read_record(journal.path).has_ended:
                return remove_run(journal.path)
        logger.info("to continue this run: mdi starter --resume %s", journal.path.parent.name)


def list_runs(options: Options) -> None:
    from mdi.run.journal import describe_runs
    from mdi.terminal import show

    lines = describe_runs(run_folder(options))
    show("\n".join(lines) if lines else f"no run in {run_folder(options)} was interrupted")


def _saved(options: Options) -> dict[str, Any]:
    """The flags of a run as JSON, as they were typed; files by their whole names."""
    flags = {**options.given, "seed": options.seed}
    if options.adapter:
        named = [one.partition("=") if "=" in one else ("", "", one) for one in options.adapter]
        flags["adapter"] = [f"{name}{sign}{_whole(folder)}" for name, sign, folder in named]
    if options.draft not in ("auto", "none"):
        flags["draft"] = _whole(options.draft)
    return {
        name: {"path": _whole(str(value))} if isinstance(value, Path) else value
        for name, value in flags.items()
        if name not in OWN
    }


def _whole(path: str) -> str:
    """Its whole name."""
    return str(Path(path).expanduser().absolute())


def _restored(options: Options, flags: dict[str, Any]) -> Options:
    """The options of a run, but for those of this command."""
    kept = {*OWN, *(["nodes_config"] if options.nodes_config is not None else [])}
    flags = {"min_p": 0.0, **flags}  # which earlier versions did not have
    found = {name: value for name, value in flags.items() if name not in kept}
    return options.with_given({n: Path(str(v.get("path"))) if isinstance(v, dict) else v for n, v in found.items()})
