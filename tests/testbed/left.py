"""Looking for what a testbed may leave on the machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hybridpar.testbed import quota
from hybridpar.testbed.plan import Plan


def left_of(plan: Plan) -> list[str]:
    """Namespaces, interfaces and groups whose name begins with the testbed's prefix."""
    told = [subprocess.run(["ip", *what], capture_output=True, text=True, check=True).stdout.split()
            for what in (("netns", "list"), ("-br", "link"))]  # fmt: skip
    names = [word for words in told for word in words]
    names += [path.name for path in Path("/run/netns").glob("*")]
    names += [path.name for path in quota.find_hierarchy().root.iterdir()]
    return sorted({name for name in names if name.startswith(plan.prefix)})
