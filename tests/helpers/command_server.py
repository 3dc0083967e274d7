"""Commands of a shell without the seconds that Python takes to import Torch: `specc` in PATH is a client of a server.

The server has imported what commands import, and forks a process for each command. The process has the streams, the
folder, the arguments and the environment of the client, which ends with its exit code.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

# The server does not run commands that look for modules elsewhere, such as those of another specc.
CLIENT = """\
#!{python} -IS
import json, os, socket, sys
if os.environ.get("PYTHONPATH", "") != {path!r}:
    os.execv({specc!r}, [{specc!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"."], [0, 1, 2])
    server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
    sys.exit(int(server.makefile().readline()))
"""
SERVER = """
import atexit, gc, importlib, json, os, pkgutil, select, signal, socket, sys
import torch
import specc.cli, specc.compiler, specc.runtime
for package in (specc.compiler, specc.runtime, specc.cli):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith("specc.runtime.submission.") and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
from specc.cli.app import main
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
while listener in select.select([listener, sys.stdin], [], [])[0]:
    connection, _ = listener.accept()
    if os.fork() == 0:
        break
    connection.close()
else:
    sys.exit()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
files = socket.recv_fds(connection, 1, 3)[1]
sys.argv[1:], folder, environment = json.loads(connection.makefile().readline())
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
try:
    main()
except SystemExit as end:
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(b"%d\\n" % (end.code or 0))
os._exit(0)  # to free all that was imported takes longer than most commands
"""


@cache
def folder_of_specc() -> Path:
    """A folder for PATH with the client of a server that ends with this process."""
    folder = Path(mkdtemp(prefix="specc_"))
    specc, path = Path(sys.executable).with_name("specc"), os.environ.get("PYTHONPATH", "")
    client = CLIENT.format(python=sys.executable, path=path, specc=str(specc), address=str(folder / "server"))
    (folder / "specc").write_text(client)
    (folder / "specc").chmod(0o755)
    command = [sys.executable, "-c", SERVER, str(folder / "server")]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    return folder


def shell_environment(forked: bool = True) -> dict[str, str]:
    """The environment of a shell that finds `specc`, by default that of the server, and programs beside this Python."""
    path = [str(folder_of_specc())] * forked + [str(Path(sys.executable).parent), os.environ["PATH"]]
    return {**os.environ, "PATH": os.pathsep.join(path)}
