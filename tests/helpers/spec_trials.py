"""The checks of a valid spec: build, train, verify, quantize, export, reload, eval, decode as without a cache."""

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from run_samples import make_run
from torch import Tensor

from specc.cli.app import run as specc
from specc.compiler.characters import START
from specc.compiler.spec.check import load
from specc.runtime.decode.lines import translator_of
from specc.runtime.decode.pages import in_pages
from specc.runtime.decode.sampling import Sampling
from specc.runtime.errors import RunFailure
from specc.runtime.generate import generate, generate_many
from specc.runtime.open_model import OpenedModel, open_model

PROMPTS = ("the model of", "a ke", "kernel")
LINES = ("(7-3*z)*(-5*z-9)", "x**2", "4*(3*x-17)*x")
NATS = {torch.float32: 2e-3, torch.bfloat16: 0.3, torch.float16: 0.1}  # by which a token may miss the most probable
CODED = 1.5  # the same where cached values are 8-bit floats
REFUSED = (2, 3, 4)  # exit codes of requests that the command cannot serve, and of runs that a budget ends


@dataclass(frozen=True)
class Trial:
    """One spec in a folder of its own.

    Attributes:
        text: the spec.
        folder: an empty folder.
        data: the text to train on.
        form: the format of one export.
    """

    text: str
    folder: Path
    data: Path
    form: str = "safetensors"

    def problems(self) -> Iterator[str]:
        """Yields what is wrong: commands that fail with other than a clear refusal, and tokens that a cache changes."""
        self.folder.mkdir(parents=True)
        path, run = self.folder / "random.yaml", self.folder / "run"
        path.write_text(self.text)
        spec = json.loads(self.text)
        source = self.source(spec["train"].get("data", {}))
        data = () if source == "polynomial" else ("--data", source)
        kind = spec.get("eval", {}).get("adapt", {}).get("kind")
        yield from self.command("build", path, "--into", self.folder / "generated")
        yield from self.command("plan", path)
        yield from self.command("train", path, *data, "--target", "cpu", "--run", run)
        yield from self.command("verify", path, refused=(3,))  # other targets need a GPU
        yield from self.command("eval", run, "--max-tokens", 256, *(("--adapt", kind) if kind else ()))
        yield from self.command("report", run, "--no-samples")
        export = self.folder / "export"
        yield from self.command("export", run, "--format", self.form, "--out", export, refused=REFUSED)
        yield from self.decoding(random_run(self.text, self.folder / "random", source))
        if "quant" not in spec:
            return
        yield from self.command("quantize", run, "--max-tokens", 256, refused=REFUSED)
        if not any(run.glob("quantized/*.specc")):
            return
        artifact = self.folder / "model.specc"
        yield from self.command("export", run, "--out", artifact)
        yield from self.command("eval", artifact, *data, "--max-tokens", 256)
        yield from self.decoding(artifact)

    def source(self, data: Mapping[str, Any]) -> str:
        """Returns what `--data` names for the data of a spec. Writes a file of lines if the spec needs one."""
        if data.get("kind") != "lines":
            return "polynomial" if data.get("kind") == "polynomial" else str(self.data)
        path, separator = self.folder / "lines.txt", data.get("separator", "=")
        path.write_text("".join(f"{i}*x{separator}{2 * i}*x\n" for i in range(100)))
        return str(path)

    def command(self, *words: object, refused: tuple[int, ...] = ()) -> Iterator[str]:
        """Runs a command in this process, and yields its output if it fails.

        An exit code of `refused` is no failure if the output has an error with a code.
        """
        output, code = io.StringIO(), 0
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = specc([str(word) for word in words])
        text = output.getvalue()
        if code and (code not in refused or ("error:" not in text and words[0] != "verify")):
            yield f"specc {words[0]} ends with {code}:\n{text[-3000:]}"

    def decoding(self, path: Path) -> Iterator[str]:
        """Decodes with caches, and yields tokens that are not the most probable of the model without a cache."""
        try:
            opened = open_model(path, "cpu", search=(self.folder,))
        except RunFailure as error:
            yield f"open {path.name}: {error}"
            return
        if opened.spec.model.reads == "lines":
            for line, translation in zip(LINES, translator_of(opened, 1).translate(LINES), strict=True):
                yield from differing(opened, line, translation)
            return
        count = opened.spec.model.window - len(PROMPTS[0]) - 1
        greedy = Sampling(0.0)
        for prompt in PROMPTS:
            yield from differing(opened, prompt, generate(opened, prompt, count, greedy))
        try:
            paged = open_model(path, "cpu", search=(self.folder,), prepared=in_pages)
        except RunFailure as error:
            if "cannot decode texts of different lengths" not in str(error):
                yield f"open {path.name} with a paged cache: {error}"
            return
        for index, text in generate_many(paged, PROMPTS, count, greedy, range(len(PROMPTS)), batch=2):
            yield from differing(opened, PROMPTS[index], text)


def random_run(text: str, folder: Path, data: str) -> Path:
    """Returns a run of a spec with random weights, which tell tokens apart better than those of a few steps."""
    spec = load(text)[0]
    make_run(folder, spec, data)
    return folder


def differing(opened: OpenedModel, start: str, end: str | bytes) -> Iterator[str]:
    """Yields the first token of `end` that is less probable than another token after the same start.

    Probabilities are those of the program `score`, which has no cache.
    """
    limit = CODED if getattr(opened.spec.model, "cache", None) and opened.spec.model.cache.dtype else 0.0
    limit = max(limit, NATS[next(opened.model.parameters()).dtype])
    nats, tokens = (of_lines if isinstance(end, str) else of_text)(opened, start, end)
    for position, token in enumerate(tokens):
        behind = float(nats[position, token] - nats[position].min())
        if not behind <= limit:
            words = f"token {position} of {end!r} is {behind:.4f} nats behind the best"
            yield f"{opened.path.name} after {start!r}: {words}"
            return


def of_text(opened: OpenedModel, start: str, end: Any) -> tuple[Tensor, list[int]]:
    """Returns the nats of all tokens at each position of `end`, [T, V], and its tokens. They may end with BOS."""
    tokenizer, vocab = opened.tokenizer, opened.spec.model.vocabulary
    given, tokens = tokenizer.encode(start.encode()).tolist(), tokenizer.encode(end).tolist()
    before = [*([tokenizer.bos] if tokenizer.bos is not None else []), *given]
    ids = torch.tensor([*before, *tokens])
    with torch.no_grad():
        every = torch.arange(tokenizer.vocab)[:, None].expand(-1, len(ids))
        nats = opened.text_model.score(ids.expand(len(every), -1), every).T
    assert tokenizer.vocab <= vocab
    return nats[len(before) - 1 :], tokens


def of_lines(opened: OpenedModel, start: str, end: Any) -> tuple[Tensor, list[int]]:
    """Returns the nats of all tokens at each position of a line, [T, V], and its tokens with the stop."""
    tokenizer, window, vocab = opened.characters, opened.spec.model.window, opened.spec.model.vocabulary
    source, target = (torch.from_numpy(tokenizer.encode_rows([text], window + 1)).long() for text in (start, end))
    source, target = source[:, :window], target[:, :window]
    length = min(len(end) + 1, window)
    rows = []
    with torch.no_grad():
        for at in range(length):
            lines = target.repeat(vocab - 1, 1)
            lines[:, at] = torch.arange(1, vocab)
            lines[:, at + 1 :] = 0
            rows.append(opened.line_model.score(source.expand(vocab - 1, -1), lines)[:, at])
    nats = torch.cat((torch.full((length, 1), torch.inf), torch.stack(rows)), 1)
    nats[:, START] = torch.inf
    return nats, target[0, :length].tolist()
