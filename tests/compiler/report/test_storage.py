"""The bytes that a plan promises an artifact to take at most, beside what one of random weights takes."""

from pathlib import Path

import pytest
from int8_models import MODELS, data_of, quantized_model
from run_samples import random_weights, small_spec
from tiny_models import spec_of

from specc.compiler import pipeline
from specc.compiler.build import canonical
from specc.compiler.report.storage import storage_of
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.runtime.artifact.artifact import ArtifactContents, measured_bytes
from specc.runtime.artifact.quantized_model import QuantizedModel
from specc.runtime.artifact.table import described
from specc.runtime.quantize.assignment import base_schemes, resolved
from specc.runtime.quantize.quantizer import Quantizer

POLY = load(Path(__file__).parents[3] / "specs/poly_attn.yaml")[0]
WHOLE = {**{name: spec_of(data_of(model)) for name, model in MODELS.items()}, "poly_attn": POLY}


def checked(spec: Spec, resolved: Spec, model: QuantizedModel) -> None:
    """Holds the promise of `spec` to the size of a file of `model`, whose spec is `resolved`."""
    text, table = canonical(resolved).encode(), described(model.schemes, model.tensors)
    size = measured_bytes(ArtifactContents(text, model.layout(), model.tensors, table=table))
    promised = storage_of(spec, pipeline.lower(spec, "cpu"), "cpu")
    assert size <= promised.bytes <= 1.25 * size


@pytest.mark.parametrize("name", WHOLE)
def test_an_artifact_of_whole_numbers_is_no_larger_than_promised(name: str) -> None:
    sample = quantized_model(WHOLE[name])
    checked(WHOLE[name], sample.spec, sample.stored)


@pytest.mark.parametrize("scheme", ["scheme: round, bits: 8", "scheme: round, bits: 5", "scheme: none, dtype: f16"])
def test_a_small_artifact_is_no_larger_than_promised(scheme: str) -> None:
    spec = small_spec(f"quant.default={{{scheme}}}", "quant.promote=null", "quant.budget_bytes=null")
    schemes = base_schemes(spec.quant, pipeline.lower(spec, "cpu").params)
    model = Quantizer(random_weights(spec)).model(schemes)
    checked(spec, resolved(spec, schemes), model)
