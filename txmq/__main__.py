"""``python -m txmq``."""

from __future__ import annotations

import sys

from txmq.cli import main

if __name__ == "__main__":
    sys.exit(main())
