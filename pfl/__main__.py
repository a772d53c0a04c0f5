"""Runs the command line: `python -m pfl` is the same as the command `pfl`."""

import sys

from pfl.cli import main

sys.exit(main())
