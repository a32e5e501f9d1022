"""The form of log lines: plain for a terminal, with time and level for a service, or JSON for a program.

The form is handed to child processes in the environment, so that the nodes of `local_ring.py` and the API process of
`serve.py` write as their parent does.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping

from mdi.terminal import LineFormatter, one_line, plain

VARIABLE = "MDI_LOG"
PLAIN, TIMED, JSON = "plain", "time", "json"
FORMS = (PLAIN, TIMED, JSON)
# Commands that run until they are ended, so their log is read later.
SERVICES = ("secondary", "serve")


def form_of(command: str, is_json: bool, environment: Mapping[str, str]) -> str:
    """The form of --log-json, else of the environment, else the command's default."""
    if is_json:
        return JSON
    named = environment.get(VARIABLE, "")
    if named in FORMS:
        return named
    return TIMED if command in SERVICES else PLAIN


def formatter(form: str, is_verbose: bool = False) -> logging.Formatter:
    """For records on stderr."""
    if form == JSON:
        return JsonFormatter()
    if form == TIMED:
        return LineFormatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
    return LineFormatter("%(asctime)s %(message)s" if is_verbose else "%(message)s", "%H:%M:%S")


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC, RFC 3339), level, message, thread and logger; `error` holds a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        found = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": one_line(record.getMessage()),
            "thread": record.threadName,
            "logger": record.name,
        }
        if record.exc_info:
            found["error"] = plain(self.formatException(record.exc_info))
        return json.dumps(found)
