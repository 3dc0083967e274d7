"""Processes that begin with what takes seconds to import: a Python that has imported it forks one for each command.

Such a process is killed, and ends, as any other. Its environment and folder are those of the command; only variables
that are read while modules are imported have to be set for the server.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

# In the child nothing of the server is left but its modules: `code` runs as at the start of an interpreter.
SERVER = """
import gc, json, os, sys
exec(sys.argv[1])
gc.freeze()  # no process walks through the modules
for line in sys.stdin:
    request = json.loads(line)
    if "pid" in request:
        pid, status = os.waitpid(request["pid"], os.WNOHANG if request["poll"] else 0)
        print(os.waitstatus_to_exitcode(status) if pid else "null", flush=True)
    elif pid := os.fork():
        print(pid, flush=True)
    else:
        break
else:
    sys.exit()
for number, path in enumerate((os.devnull, request["stdout"], request["stderr"])):
    file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC | os.O_APPEND if number else 0), 0o600)
    os.dup2(file, number)
    os.close(file)
sys.stdin = open(0, closefd=False)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
sys.argv[:] = ["-c", *request["words"]]
code = request["code"]
del gc, json, line, request, number, path, file
exec(code)
"""


# A process that compiles spends seconds on imports, on digests of the sources of Torch and Triton, and on C++ files
# that show what the CPU can do. A matrix product needs no other C++. No backward runs, which could start threads.
COMPILED = """
import torch
import torch._inductor.compile_fx
from torch._dynamo.utils import counters
from torch._inductor.cpu_vec_isa import pick_vec_isa
import specc.compiler.render.model, specc.compiler.spec.check, specc.runtime.model.load
pick_vec_isa()
torch.compile(lambda x: x @ x)(torch.ones(2, 2, dtype=torch.float64, requires_grad=True))
torch._dynamo.reset()
counters.clear()
"""


class Forked:
    """A process that a server has forked, with the part of the interface of `subprocess.Popen` that tests use."""

    def __init__(self, server: "ForkServer", pid: int, stdout: Path, stderr: Path) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self._server = server
        self._code: int | None = None

    def poll(self, wait: bool = False) -> int | None:
        if self._code is None:
            self._code = self._server.request({"pid": self.pid, "poll": not wait})
        return self._code

    def wait(self) -> int:
        code = self.poll(wait=True)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """A Python that has run `preload`, and forks."""

    def __init__(self, preload: str, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, *flags, "-c", SERVER, preload]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, env=environment, **pipes)  # type: ignore[call-overload]

    def request(self, data: Mapping[str, object]) -> int | None:
        self._process.stdin.write(json.dumps(data) + "\n")
        self._process.stdin.flush()
        result: int | None = json.loads(self._process.stdout.readline())
        return result

    def start(
        self,
        code: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        stderr: Path,
        stdout: Path = Path(os.devnull),
        folder: Path | None = None,
    ) -> Forked:
        """Starts a process that runs `code`.

        Args:
            code: Python source.
            words: `sys.argv` behind its first entry.
            environment: all environment variables of the process.
            stderr: the file that its errors replace.
            stdout: the file that its output replaces; it may be the same file.
            folder: its working directory; by default that of this process.
        """
        where = {"stdout": str(stdout), "stderr": str(stderr), "folder": str(folder or Path.cwd())}
        pid = self.request({"code": code, "words": [*words], "environment": {**environment}, **where})
        assert pid is not None
        return Forked(self, pid, stdout, stderr)

    def close(self) -> None:
        self._process.communicate()


@cache
def _torch_server(interpret: bool) -> ForkServer:
    """A server that has imported Torch and what trains, or Triton with its interpreter. It ends with this process."""
    if not interpret:
        return ForkServer("import torch, torch._dynamo, specc.runtime.train.train", environment=_environment(interpret))
    helpers = str(Path(__file__).parent)
    quicken = (
        f"sys.path.insert(0, {helpers!r}); import quick_interpreter; quick_interpreter.quicken(); import kernel_sites"
    )
    return ForkServer(quicken, environment=_environment(interpret))


def output_of(code: str, *words: str, folder: Path) -> bytes:
    """Runs code that needs Torch in a process of its own, requires that it succeeds, and returns its output.

    Args:
        code: Python source.
        words: `sys.argv` behind its first entry.
        folder: where the files with its output are written.
    """
    stdout, stderr = folder / "code.stdout", folder / "code.stderr"
    process = _torch_server(interpret=False).start(code, words, os.environ, stderr, stdout)
    assert process.wait() == 0, stderr.read_text()[-3000:]
    return stdout.read_bytes()


@cache
def compiling_server() -> ForkServer:
    """A server that has compiled a program: its processes compile in less time, for the CPU alone. It ends with this
    process, and stores compiled C++ in the folder that all processes of a machine share."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    # Torch looks at all GPUs when it compiles. Each fork would start a pool of processes.
    more = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return ForkServer(COMPILED, environment=environment | more)


def _environment(interpret: bool) -> dict[str, str]:
    return {**os.environ, **({"TRITON_INTERPRET": "1"} if interpret else {})}


def run_script(script: Path, *words: str, folder: Path, interpret: bool = False) -> None:
    """Runs a script that needs Torch in a process of its own, and requires that it succeeds.

    Args:
        script: the Python file.
        words: its arguments.
        folder: where the files with its output are written.
        interpret: whether Triton's interpreter runs kernels.
    """
    process = started_script(script, words, folder, _environment(interpret), "script", interpret)
    assert process.wait() == 0, process.stderr.read_text()[-3000:]


def started_script(
    script: Path, words: Sequence[str], folder: Path, environment: Mapping[str, str], name: str, interpret: bool = False
) -> Forked:
    """Starts a script that needs Torch in a process of its own.

    Args:
        script: the Python file.
        words: its arguments.
        folder: where the files with its output are written.
        environment: all environment variables of the process.
        name: the name of these files, without endings.
        interpret: whether Triton's interpreter runs kernels.
    """
    code = "import os, runpy, sys; sys.argv.pop(0); sys.path.insert(0, os.path.dirname(sys.argv[0]))"
    code += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    stdout, stderr = folder / f"{name}.stdout", folder / f"{name}.stderr"
    return _torch_server(interpret).start(code, (str(script), *words), environment, stderr, stdout)
