"""`python -m lmtier`."""

import sys

from lmtier.cli import main

sys.exit(main())
