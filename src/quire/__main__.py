"""`python -m quire`: the command line, with the interpreter at hand."""

import sys

from quire.entrypoints.cli.main import main

sys.exit(main())
