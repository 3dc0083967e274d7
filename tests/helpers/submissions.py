"""Submissions, and processes that find torch and neither specc nor what specc alone needs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fork_server import Forked, ForkServer
from run_samples import small_spec, write_text

from specc.runtime.artifact.codecs import Codec
from specc.runtime.data.shards.shard_file import ShardWriter
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage.run_directory import Run
from specc.runtime.submission.export import export_submission
from specc.runtime.submission.names import CODE
from specc.runtime.train.train import TrainOptions, train

# torch, numpy, and what torch needs to be imported; neither specc nor what specc alone needs.
ALONE = ("torch", "torchgen", "functorch", "numpy", "numpy.libs", "typing_extensions.py", "sympy", "mpmath")
ALONE += ("networkx", "filelock", "fsspec", "nvidia", "triton")
ABSENT = ("specc", "pydantic", "jinja2", "sentencepiece", "tiktoken", "safetensors", "click", "platformdirs", "brotli")
LATE = ("train.schedule={warmdown_steps: 3}", "train.qat={below: 0.7}")  # the second step and the third are rounded
WINDOWS = "eval={batch: 4, window: 24, stride: 8}"  # shorter than the context
ALONE_WITH_TORCH = """
import importlib.util, sys
sys.path.insert(0, {folder!r})
absent = [name for name in {absent!r} if importlib.util.find_spec(name)]
assert not absent, absent
import torch, torch._dynamo
"""
START = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True)
class Submission:
    """A run that was trained on `shards` and quantized, and its submission with `codec`."""

    run: Run
    shards: Path
    folder: Path
    torch: ForkServer


def write_shards(folder: Path) -> Path:
    text = write_text(folder / "text")
    for split in ("train", "val"):
        tokens = ByteTokenizer().encode((text / f"{split}.txt").read_bytes())
        with ShardWriter(folder / f"it_{split}_000000.bin") as writer:
            writer.write(np.concatenate([np.array([256], np.uint16), tokens]))
    return folder


def new_submission(folder: Path) -> Submission:
    """Trains, quantizes and exports a run below a folder, and starts a server that runs its code."""
    shards, packages = write_shards(folder / "data"), folder / "alone"
    packages.mkdir()
    installed = Path(torch.__file__).parents[1]
    for name in ALONE:
        if (installed / name).exists():
            (packages / name).symlink_to(installed / name)
    result = train(TrainOptions(small_spec(*LATE, WINDOWS), "cpu", str(shards), folder / "run"), lambda _: None)
    quantize(result.run, QuantizeOptions(max_tokens=100), lambda _: None)
    export_submission(result.run, folder / "out", codec=Codec.LZMA)
    return Submission(Run.open(result.run), shards, folder / "out", only_torch(packages, ABSENT))


def only_torch(packages: Path, absent: Sequence[str]) -> ForkServer:
    """An interpreter that finds the packages of a folder alone, and none that has to be absent."""
    preload = ALONE_WITH_TORCH.format(folder=str(packages), absent=tuple(absent))
    environment = {"OMP_NUM_THREADS": "1", "HOME": str(packages), "PATH": os.environ["PATH"]}
    return ForkServer(preload, ("-I", "-S"), environment)


def started(submission: Submission, folder: Path, *arguments: str, name: str = "done", **more: str) -> Forked:
    """Starts train_gpt.py of `folder`; its output goes to files beside the folder."""
    environment = {"OMP_NUM_THREADS": "1", "HOME": str(folder), "PATH": os.environ["PATH"], **more}
    stdout, stderr = (folder.parent / f"{folder.name}.{name}.{stream}" for stream in ("stdout", "stderr"))
    return submission.torch.start(START, (CODE, *arguments), environment, stderr, stdout, folder)


def alone(submission: Submission, folder: Path, *arguments: str) -> Any:
    """Runs train_gpt.py of `folder` where there is nothing but torch."""
    return ended(started(submission, folder, *arguments))


def ended(process: Forked) -> Any:
    code = process.wait()
    return SimpleNamespace(returncode=code, stdout=process.stdout.read_text(), stderr=process.stderr.read_text())
