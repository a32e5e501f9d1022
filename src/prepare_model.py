#!/usr/bin/env python3
"""Download, convert and split a model: prepare_model.py --help."""

import sys

from mdi.cli import launch

sys.exit(launch("prepare-model"))
