#!/usr/bin/env python3
"""Download, convert and split a model: prepare_model.py --help."""

from mdi.cli import launch, leave

leave(launch("prepare-model"))
