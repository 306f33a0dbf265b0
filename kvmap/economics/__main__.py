"""`python -m kvmap.economics`: see `kvmap.economics.command`."""

from __future__ import annotations

import sys

from kvmap.economics.command import main

sys.exit(main())
