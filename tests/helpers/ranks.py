"""The environment of a process that is one rank of several."""

import os

from run_samples import HELPERS


def environment(**more: str) -> dict[str, str]:
    """One thread, the helpers on the path, the loopback interface, and `more`."""
    path = os.pathsep.join((str(HELPERS), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", **more}
