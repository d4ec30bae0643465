"""`python -m lmtier`."""

import sys

from lmtier.tools.cli import main

sys.exit(main())
