"""`python -m pfl fit|validate|test|predict --config FILE`."""

import sys

from pfl.cli import main

sys.exit(main())
