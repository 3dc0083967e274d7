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

# The server does not run commands that look for modules elsewhere, such as those of another specc. A signal to the
# client is one to the process that the server has forked for it; this process cannot end with a launcher that dies.
CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys
words, environment = sys.argv[1:], dict(os.environ)
if {module!r}:
    words = words[len({module!r}):] if words[:len({module!r})] == {module!r} else None
if words is None or environment.get("PYTHONPATH", "") != {path!r}:
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
environment.pop("SPECC_LAUNCHER", None)
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"."], [0, 1, 2])
    server.sendall(json.dumps([words, os.getcwd(), environment]).encode() + b"\\n")
    answers = server.makefile()
    pid = int(answers.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    code = answers.readline()
    if not code:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(code))
"""
MODULE = ["-P", "-m", "specc.cli"]  # how specc starts itself, for the runs of a sweep and for ranks
SERVER = """
import atexit, gc, importlib, json, os, pkgutil, select, signal, socket, sys
import torch, torch._dynamo
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
sys.executable = sys.argv[2]
sys.argv[1:], folder, environment = json.loads(connection.makefile().readline())
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
leave = os._exit
def end(code):  # to free all that was imported takes longer than most commands
    connection.sendall(b"%d\\n" % code)
    leave(code)
os._exit = end  # ranks call it
connection.sendall(b"%d\\n" % os.getpid())
try:
    main()
except SystemExit as done:
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    end(done.code or 0)
leave(1)
"""


@cache
def folder_of_specc() -> Path:
    """A folder for PATH with the client of a server that ends with this process. Its `specc-python` is this Python,
    except that the server runs the commands of specc."""
    folder = Path(mkdtemp(prefix="specc_"))
    python, path = Path(sys.executable), os.environ.get("PYTHONPATH", "")
    for name, real, module in (("specc", python.with_name("specc"), []), ("specc-python", python, MODULE)):
        settings = {"path": path, "real": str(real), "module": module, "address": str(folder / "server")}
        (folder / name).write_text(CLIENT.format(python=python, **settings))
        (folder / name).chmod(0o755)
    command = [sys.executable, "-c", SERVER, str(folder / "server"), str(folder / "specc-python")]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    return folder


def shell_environment(forked: bool = True) -> dict[str, str]:
    """The environment of a shell that finds `specc`, by default that of the server, and programs beside this Python."""
    path = [str(folder_of_specc())] * forked + [str(Path(sys.executable).parent), os.environ["PATH"]]
    return {**os.environ, "PATH": os.pathsep.join(path)}
