"""Models with a prefix whose tokens attend to each other: masks, loss, scores, bits per byte, prompts."""

import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ATTENTION, MLP, float64, pair, spec_data, spec_of, tiny
from torch import Tensor

from specc.compiler import pipeline
from specc.compiler.expr import ExprError
from specc.compiler.expr.mask import bound_mask
from specc.compiler.ops.attention import Sdpa
from specc.compiler.programs.programs import LoweringError
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.evaluation import WindowPlan
from specc.runtime.data.windows.stream import open_stream
from specc.runtime.metrics.bits_per_byte import ScoredText, evaluate_bits
from specc.runtime.model.guards import check_programs

PREFIX, CONTEXT = 5, 16
ATTENDS = {**ATTENTION, "mask": "j <= i or j < prefix", "rope": {}}
SPEC = tiny((ATTENDS, MLP), prefix=PREFIX, context=CONTEXT)


@pytest.mark.parametrize("text", ["j <= i or j < prefix", "(j <= i and i - j < 4) or (j < prefix and i < prefix)"])
def test_a_mask_holds_for_the_pairs_that_it_states(text: str) -> None:
    op = Sdpa(mask=bound_mask(text, 2, CONTEXT, PREFIX))
    q = torch.zeros(1, CONTEXT, 2, 4)
    expected = [[bool(eval(text, {"i": i, "j": j, "prefix": PREFIX})) for j in range(CONTEXT)] for i in range(CONTEXT)]
    assert op.allowed(q, q, q).tolist() == expected and op.allowed(q, q, q)[0, PREFIX - 1]


@pytest.mark.parametrize("text", ["j <= i or j <= prefix", "j <= i or i < prefix", "j <= i or j < 64", "j < 5 + i"])
def test_a_mask_that_leaves_the_prefix_is_refused_with_a_pair(text: str) -> None:
    with pytest.raises(ExprError, match="outside the prefix of 5") as caught:
        bound_mask(text, 2, 128, PREFIX)
    words = caught.value.message.replace(",", "").split()
    i, j = (int(words[k + 2]) for k, word in enumerate(words) if word in "ij" and words[k + 1] == "=")
    assert j > i and j >= PREFIX and eval(text, {"i": i, "j": j, "prefix": PREFIX})


def test_loss_and_scores_begin_behind_the_prefix(tmp_path: Path) -> None:
    """The first row that counts is the last of the prefix, whose target is the first token that no row before sees."""
    models = pair(SPEC, tmp_path)
    with float64(), torch.no_grad():
        ids, targets = models.batch()
        scores = models.model.score(ids, targets)
        assert (scores[:, : PREFIX - 1] == 0).all() and (scores[:, PREFIX - 1 :] > 0).all()
        torch.testing.assert_close(models.model(ids, targets), scores[:, PREFIX - 1 :].mean())
        for j in range(CONTEXT):
            changed = ids.clone()
            changed[:, j] = (changed[:, j] + 1) % SPEC.model.vocabulary
            moved = (models.model.score(changed, targets) - scores).abs()
            assert not moved[:, :j].any()
            assert (moved[:, max(j, PREFIX - 1) :] > 0).all()


@pytest.mark.parametrize("terms", [("z",), ("later_token",), ("z", "later_token")], ids=" ".join)
def test_terms_of_the_loss_begin_behind_the_prefix(terms: Sequence[str], tmp_path: Path) -> None:
    """Each term by hand, over the tokens that count: the last of the prefix, and those behind it."""
    data = spec_data((ATTENDS, MLP), prefix=PREFIX, context=CONTEXT, fuse=())
    more = {"z": {"kind": "z", "weight": 0.01}, "later_token": {"kind": "later_token", "ahead": 2, "weight": 0.5}}
    data["train"]["losses"] = [{"kind": "next_token"}, *(more[term] for term in terms)]
    models = pair(spec_of(data), tmp_path)
    with float64(), torch.no_grad():
        ids, targets = models.batch()
        weights = [torch.tensor(float(more[term]["weight"])) for term in terms]
        logits = (models.model.features(ids) @ models.params["embed.token"].T)[:, PREFIX - 1 :]
        counted, nats = targets[:, PREFIX - 1 :], logits.log_softmax(-1)
        expected = -nats.gather(-1, counted.unsqueeze(-1)).squeeze(-1)
        if "z" in terms:
            expected = expected + 0.01 * logits.logsumexp(-1).square()
        if "later_token" in terms:
            expected[:, :-1] -= 0.5 * nats[:, :-1].gather(-1, counted[:, 1:].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(models.model(ids, targets, *weights), expected.mean())


@pytest.mark.parametrize("more", [{}, {"chunks": 4}], ids=["whole", "chunks"])
@pytest.mark.parametrize(
    "losses", [[], [{"kind": "z", "weight": 0.01}], [{"kind": "later_token", "ahead": 2, "weight": 1}]]
)
def test_a_fused_loss_refuses_a_prefix_with_its_reason(more: dict[str, int], losses: list[dict[str, Any]]) -> None:
    data = spec_data((ATTENDS, MLP), prefix=PREFIX, context=CONTEXT, fuse=({"head": ["logits", "loss"], **more},))
    data["train"]["losses"] = [{"kind": "next_token"}, *losses]
    with pytest.raises(LoweringError, match=r"cannot ignore targets, but head\.loss ignores targets of -1"):
        pipeline.plan(spec_of(data), "cpu", "specs/tiny.yaml")


def test_a_prompt_within_the_prefix_is_refused(tmp_path: Path) -> None:
    models = pair(SPEC, tmp_path)
    model: Any = models.model
    check_programs(model, models.programs, SPEC.model.vocabulary, SPEC.model.unscored + 1)
    ids, _ = models.batch()
    with float64(), torch.no_grad():
        for program in (model.score, lambda ids, _: model.prefill(ids, torch.tensor(0), model.new_cache(2, CONTEXT))):
            with pytest.raises(ValueError, match="ids has 4 tokens per row; a new sequence of this model needs"):
                program(ids[:, :4], ids[:, :4])
        cache = model.new_cache(2, CONTEXT)
        model.prefill(ids[:, :PREFIX], torch.tensor(0), cache)
        model.prefill(ids[:, PREFIX : PREFIX + 2], torch.tensor(PREFIX), cache)
        model.decode(ids[:, PREFIX + 2 : PREFIX + 3], torch.tensor(PREFIX + 2), cache)


@pytest.mark.parametrize("stride", [None, 16, 12, 11, 3])
def test_bits_per_byte_leave_out_the_targets_of_each_prefix(tmp_path: Path, stride: int | None) -> None:
    generator = random.Random(5)
    texts = ["".join(generator.choices("abc é", k=generator.randrange(1, 60))) for _ in range(9)]
    (tmp_path / "val.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    tokenizer = ByteTokenizer()
    stream = open_stream(tmp_path / "val.jsonl", "val", tokenizer, tmp_path / "cache")
    tokens, step = [int(token) for token in stream.read(0, stream.tokens)], stride or CONTEXT

    def score(ids: Tensor, targets: Tensor) -> Tensor:
        scores = 0.25 + ((ids * 7919 + targets * 104729) % 1009).double() / 100
        scores[:, : PREFIX - 1] = 1e9  # of no account
        return scores

    nats, size, count, done = Fraction(0), 0, 0, 0
    while done < stream.tokens - 1:
        end = min(stream.tokens - 1, done + step if done else CONTEXT)
        start = max(0, end - CONTEXT)
        for target in range(max(done, start + PREFIX - 1) + 1, end + 1):
            before, token = tokens[target - 1], tokens[target]
            nats += Fraction(0.25 + ((before * 7919 + token * 104729) % 1009) / 100)
            size, count = size + (token < 256), count + 1
        done = end
    plan = WindowPlan(CONTEXT, 3, stride, PREFIX - 1)
    bits = evaluate_bits(score, ScoredText(stream, tokenizer), plan)
    assert (bits.tokens, bits.piece_bytes, bits.document_bytes) == (count, size, None)
    assert bits.nats == pytest.approx(float(nats), rel=1e-12) and bits.bpb == bits.bpb_pieces
    if step <= CONTEXT - PREFIX + 1:  # every target but those of the first prefix
        assert count == stream.tokens - 1 - (PREFIX - 1)
