"""gpt_mlp35 in its full size on a GPU: 64 texts of 2,048 tokens, cached and captured, against the uncached model."""

import time
from pathlib import Path
from typing import cast

import pytest
import torch
from sampled_tokens import sample_tokens
from tiny_models import random_params
from torch import Tensor

from specc.compiler.pipeline import lower
from specc.compiler.spec.check import load
from specc.runtime.decode.sampling import Sampling
from specc.runtime.decode.text import Decoder
from specc.runtime.model.protocols import GeneratedText
from specc.runtime.open_model import realize

pytestmark = pytest.mark.gpu

SPEC = load(Path(__file__).parents[3] / "specs/gpt_mlp35.yaml")[0]
ROWS, WINDOW, VOCAB = 64, 2048, 1024


def nats(model: GeneratedText, ids: Tensor) -> Tensor:
    """Of each token after the first, f32 [rows, tokens - 1], uncached."""
    with torch.no_grad():
        return torch.cat([model.score(rows[:, :-1], rows[:, 1:]) for rows in ids.split(4)])


def test_the_whole_model_is_no_worse_cached_than_uncached(capsys: pytest.CaptureFixture[str]) -> None:
    device = torch.device("cuda")
    params = random_params(lower(SPEC, "cpu"), 0)
    weights = {name: value.bfloat16().float() for name, value in params.items()}
    model = cast(GeneratedText, realize(SPEC, "sm90", "cuda", weights, fuse=False).model)
    start = torch.ones(ROWS, 1, dtype=torch.int64, device=device)
    result, lines = [], []
    for seeds in (range(ROWS), range(ROWS)):
        torch.cuda.synchronize()
        began, decoder = time.monotonic(), Decoder(model, WINDOW, device, ROWS)
        ids = torch.stack([start[:, 0], *sample_tokens(decoder, start, VOCAB, Sampling(0.8), seeds, WINDOW)], 1)
        torch.cuda.synchronize()
        seconds = time.monotonic() - began
        lines.append(f"{ROWS} x {WINDOW} tokens in {seconds:.2f} s, {decoder.preparing:.2f} s of them preparing")
        result.append(ids)
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    ids = result[0]
    assert torch.equal(ids, result[1]) and int(ids.min()) >= 0 and len({tuple(row) for row in ids.tolist()}) == ROWS

    decoder = Decoder(model, WINDOW, device, ROWS)
    cached = [decoder.prefill(ids[:, :1]).log_softmax(-1).gather(1, ids[:, 1:2])]
    for at in range(1, WINDOW):
        cached.append(decoder.append(ids[:, at]).log_softmax(-1).gather(1, ids[:, at + 1 : at + 2]))
    del decoder  # the caches of 64 texts
    uncached = nats(model, ids)
    exact = nats(cast(GeneratedText, realize(SPEC, "cpu", "cuda", weights, fuse=False).model), ids)
    errors = [float((given - exact).square().mean().sqrt()) for given in (-torch.cat(cached, 1), uncached)]
    assert errors[0] < 1.2 * errors[1], errors
    assert errors[1] < 0.5 * float(exact.std())  # else the model is noise, and nothing is compared
