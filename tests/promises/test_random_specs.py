"""Random specs of all options: a spec that is accepted builds, trains, verifies, decodes, quantizes and exports."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from random_specs import SECTIONS, RandomSpecs
from run_samples import write_text
from spec_texts import LEFT_OUT
from spec_trials import Trial
from tiers import Trials, rounds_left, tiers

from specc.compiler.errors import SpecError
from specc.compiler.spec.check import load

FORMS = ("safetensors", "pt2", "hf")
# Written by the methods of RandomSpecs, or part of FRAGMENTS, CHANGES, BETWEEN and INITS.
COMPOSED = {
    "Between", "Change", "ConcatStage", "Init", "Learned", "OrderSchedule", "Project", "RepeatStage", "SizeSchedule",
}  # fmt: skip
COMPOSED_FIELDS = {"name", "learn", "read", "write", "common", "correction_rank"}
COMPOSED_PLACES = {
    "Decoder.prefix", "QuantSpec.budget_bytes", "TrainSpec.context", "TrainSpec.tokens_per_step", "Vocabulary.chars",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small matrices on one thread; the random numbers of Torch stay those of the other tests."""
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def test_every_field_is_drawn() -> None:
    """A new field of the schema is drawn without a change of the generator, unless it is a text without choices."""
    specs = RandomSpecs(random.Random(1))
    for _ in range(2000):
        specs.spec("random")
    fields = {f"{section}.{key}" for section, schema in SECTIONS.items() for key in schema.get("properties", {})}
    composed = {field for field in fields if field.partition(".")[0] in COMPOSED or field in COMPOSED_PLACES}
    composed |= {field for field in fields if field.partition(".")[2] in COMPOSED_FIELDS}
    left_out = {field for field in fields if field in LEFT_OUT or field.partition(".")[0] in LEFT_OUT}
    missing = fields - specs.drawn - composed - left_out
    assert not missing, f"CHOICES in spec_texts.py has no values for {sorted(missing)}"


def test_equal_seeds_give_equal_specs_and_errors_have_places() -> None:
    """The error of a refused spec has a code and a line of the spec."""
    first, second = (RandomSpecs(random.Random(3)) for _ in range(2))
    refused = 0
    for _ in range(20):
        data = first.spec("random")
        assert data == second.spec("random")
        text = json.dumps(data, indent=1)
        try:
            load(text)
        except SpecError as error:
            refused += 1
            assert all(each.code[0] == "S" and each.mark.line > 1 for each in error.diagnostics), error
    assert refused


@tiers("C1", valid_random_specs=(3, 1_000))
def test_a_random_spec_that_is_accepted_works(trials: Trials, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    data, count = write_text(tmp_path / "data"), trials["valid_random_specs"]
    assert pytestconfig.cache is not None
    names = [f"seed {seed}" for seed in range(count)]
    rounds = names if count < 10 else rounds_left(pytestconfig.cache, "random specs", names)
    for name in rounds:
        rng = random.Random(name)
        specs, folder = RandomSpecs(rng), tmp_path / name.replace(" ", "_")
        try:
            text = specs.valid("random")
        except Exception as error:
            raise AssertionError(f"{name}: {error!r} is not an error of a spec\n{specs.text}") from error
        problems = [*Trial(text, folder, data, rng.choice(FORMS)).problems()]
        assert not problems, "\n".join((name, *problems, text))
        shutil.rmtree(folder)
