"""Says in one line which tests were skipped, and why: skip_reasons.py REPORT, as pytest --junitxml wrote."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as tree
from collections import Counter

skipped = [
    e.get("message") for e in tree.parse(sys.argv[1]).iter("skipped") if e.get("type") == "pytest.skip"
]
reasons = [f"{count} x {reason}" for reason, count in Counter(skipped).most_common()]
print(f"{len(skipped)} skipped" + (": " + "; ".join(reasons) if reasons else ""))
