#!/usr/bin/env python3
"""Launcher: `mdi chat`."""

from mdi.cli import launch, leave

if __name__ == "__main__":
    leave(launch("chat"))
