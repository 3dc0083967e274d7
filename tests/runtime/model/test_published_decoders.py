"""Published decoders without a committed spec: the logits of `transformers`, cached and not."""

from pathlib import Path

import pytest
import torch
import transformers
import yaml
from family import CONTEXT, randomized
from published_decoders import DECODERS, SIZES, VOCABULARY
from tiny_models import TRAIN, spec_of
from torch.nn import functional as F

from specc.runtime.model.load import instantiate

TOKENS, PROMPT = 40, 24  # both longer than a window


@pytest.mark.parametrize("name", DECODERS)
def test_a_published_decoder(name: str, tmp_path: Path) -> None:
    decoder = DECODERS[name]
    fields = {
        key: value for key, value in {**SIZES, **decoder.fields}.items() if key == "pad_token_id" or value is not None
    }
    theirs = randomized(getattr(transformers, decoder.config)(**fields), 1)
    theirs.config._attn_implementation = decoder.attention
    biases = {key: value for key, value in theirs.named_buffers() if key.endswith("correction_bias")}
    for bias in biases.values():
        bias.normal_(std=0.3)
    weights = {**dict(theirs.named_parameters()), **biases}
    data = {
        "spec_version": 2,
        "name": name,
        "targets": ["cpu"],
        "model": {"kind": "decoder", "vocab": VOCABULARY, "context": CONTEXT, **yaml.safe_load(decoder.model)},
        "fuse": [],
        "train": {**TRAIN, "tokens_per_step": 2 * CONTEXT},
    }
    ours = instantiate(spec_of(data), "cpu", tmp_path).model
    read = set()
    with torch.no_grad():
        for key, value in ours.named_parameters():
            source, tensor = decoder.source(key, weights)
            read.add(source)
            value.copy_(tensor.reshape(value.shape))
        assert read == weights.keys()
        assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in weights.values())
        ids, targets = torch.randint(VOCABULARY, (2, 2, TOKENS), generator=torch.Generator().manual_seed(1))
        expected = theirs(ids).logits
        nats = F.cross_entropy(expected.transpose(1, 2), targets, reduction="none")
        torch.testing.assert_close(ours.score(ids, targets), nats, rtol=0, atol=1e-4)
        cache = ours.new_cache(2, CONTEXT)
        logits = [ours.prefill(ids[:, :PROMPT], torch.tensor(0), cache)]
        for t in range(PROMPT, TOKENS):
            logits.append(ours.decode(ids[:, t : t + 1], torch.tensor(t), cache))
        torch.testing.assert_close(torch.stack(logits, 1), expected[:, PROMPT - 1 :], rtol=0, atol=1e-4)
