"""A process of test_heartbeat.py: a process of a world that stops itself.

usage: hang_scene.py STOPPED, in the environment of torchrun: the rank that stops, or -1 for none.
"""

import os
import signal
import sys
import time

from specc.runtime.distributed import heartbeat
from specc.runtime.distributed.world import joined


def main(stopped: int) -> None:
    heartbeat.INTERVAL, heartbeat.PATIENCE = 0.1, 2.0
    with joined() as world:
        world.wait()
        time.sleep(0.5)
        if world.rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        if world.rank == 1 and stopped < 0:
            time.sleep(2 * heartbeat.PATIENCE)  # slow, but alive
            stop = world._heartbeat.stop
            world._heartbeat.stop = lambda: (time.sleep(0.5), stop())  # slow to leave, too
        world.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
