"""`python -m kvmap.report`."""

import sys

from kvmap.report.command import main

sys.exit(main())
