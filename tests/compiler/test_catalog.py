"""Finding features by scanning a package."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Union

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from specc.compiler import blocks, kernels, losses, ops, quant
from specc.compiler.blocks.parts import Embed, Layer
from specc.compiler.catalog import Kinds, catalog, classes, models
from specc.compiler.ir.op import Op
from specc.compiler.kernels.kernel import Kernel
from specc.compiler.losses.term import LossTerm
from specc.compiler.quant.scheme import Scheme
from specc.compiler.strict import tag_of
from specc.compiler.targets import Target


@pytest.fixture
def package(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """A package of two modules, each with the text that the test gives."""
    name = f"scanned_{abs(hash(request.node.name))}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    for module, text in zip("ba", request.param, strict=True):
        (folder / f"{module}.py").write_text(text)
    sys.path.insert(0, str(tmp_path))
    yield __import__(name)
    sys.path.remove(str(tmp_path))
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name]:
        del sys.modules[loaded]


HEAD = (
    "from specc.compiler.targets import Target\nfrom specc.compiler.blocks.parts import Layer\n"
    "from typing import Literal\n"
)
ONE = "T{0} = Target('{0}', 'a', 'f32', frozenset(), ())\n"


@pytest.mark.parametrize("package", [(HEAD + ONE.format("x"), HEAD + ONE.format("z") + ONE.format("y"))], indirect=True)
def test_values_are_found_in_order_of_file_then_of_line(package: ModuleType) -> None:
    result = catalog(package, Target)
    assert list(result) == ["z", "y", "x"]
    assert catalog(package, Target) is result
    with pytest.raises(TypeError):
        result["w"] = result["x"]  # type: ignore[index]


@pytest.mark.parametrize(
    "package", [(HEAD + ONE.format("x"), HEAD + ONE.format("x").replace("'a'", "'b'"))], indirect=True
)
def test_two_values_of_one_name_are_refused(package: ModuleType) -> None:
    with pytest.raises(ValueError, match="two entries are named 'x'"):
        catalog(package, Target)


@pytest.mark.parametrize(
    "package", [(HEAD + ONE.format("x"), HEAD + f"from scanned_{{}}.b import Tx\n{ONE.format('y')}")], indirect=True
)
def test_a_value_that_another_module_imports_counts_once(package: ModuleType) -> None:
    Path(str(package.__file__)).with_name("a.py").write_text(
        f"{HEAD}from {package.__name__}.b import Tx\n{ONE.format('y')}"
    )
    assert sorted(catalog(package, Target)) == ["x", "y"]


LAYER = "class A(Layer):\n    kind: Literal['{0}']\n"
OP = "from specc.compiler.ir.graph import Op\nclass A(Op):\n    name = '{0}'\n"


@pytest.mark.parametrize("package", [(HEAD + LAYER.format("p"), HEAD + LAYER.format("p"))], indirect=True)
def test_two_models_of_one_word_are_refused(package: ModuleType) -> None:
    with pytest.raises(ValueError, match="two models are of kind 'p'"):
        models(package, Layer, "kind")


KINDS = (
    HEAD + LAYER.format("b") + "class B(Layer):\n    kind: Literal['second']\n",
    HEAD + LAYER.format("other") + "    size: int\n",
)


@pytest.mark.parametrize("package", [KINDS], indirect=True)
def test_a_kind_is_imported_when_data_name_it(package: ModuleType) -> None:
    """`b` and `second` are in the module b, and `other` in a."""

    def imported() -> set[str]:
        return {name for name in ("a", "b") if f"{package.__name__}.{name}" in sys.modules}

    kinds = Kinds(package, Layer)
    adapter = TypeAdapter[Any](tuple[kinds, ...])  # type: ignore[valid-type]
    assert imported() == set()
    assert [layer.kind for layer in adapter.validate_python(({"kind": "b"}, {"kind": "second"}))] == ["b", "second"]
    assert imported() == {"b"}
    (layer,) = adapter.validate_json('[{"kind": "other", "size": 3}]')
    assert adapter.validate_python((layer,)) == (layer,) and adapter.dump_python((layer,), mode="json")[0]["size"] == 3
    assert imported() == {"a", "b"} and [tag_of(model, "kind") for model in kinds.models] == ["other", "b", "second"]


@pytest.mark.parametrize("package", [KINDS], indirect=True)
def test_errors_and_schema_of_kinds_are_those_of_the_union(package: ModuleType) -> None:
    kinds = Kinds(package, Layer)
    lazy = TypeAdapter[Any](tuple[kinds, ...])  # type: ignore[valid-type]
    union = TypeAdapter[Any](tuple[Annotated[Union[kinds.models], Field(discriminator="kind")], ...])  # type: ignore[name-defined]  # noqa: UP007
    for bad in ({"kind": "c"}, {"size": 1}, {"kind": "other", "size": "1"}, {"kind": "b", "size": 1}, {"kind": []}, 3):
        errors = []
        for adapter in (lazy, union):
            with pytest.raises(ValidationError) as caught:
                adapter.validate_python(({"kind": "b"}, bad))
            errors.append(caught.value.errors(include_url=False))
        assert errors[0] == errors[1] and errors[0][0]["loc"][0] == 1
    assert lazy.json_schema() == union.json_schema()


@pytest.mark.parametrize("package", [(OP.format("n"), OP.format("n"))], indirect=True)
def test_two_classes_of_one_name_are_refused(package: ModuleType) -> None:
    with pytest.raises(ValueError, match="two classes are named 'n'"):
        classes(package, Op)


@pytest.mark.parametrize("package", [(OP.format("b"), OP.format("a") + "class Base(Op):\n    pass\n")], indirect=True)
def test_classes_without_a_name_are_bases(package: ModuleType) -> None:
    assert list(classes(package, Op)) == ["a", "b"]


def test_the_catalogs_of_specc() -> None:
    assert {"attention", "mlp"} <= {
        model.model_fields["kind"].annotation.__args__[0] for model in models(blocks, Layer, "kind")
    }  # type: ignore[union-attr]
    embed = {"Token", "Project", "EmbedNorm", "EmbedPositions", "EmbedScale", "Bigram", "Smear", "SmearByToken"}
    assert {model.__name__ for model in models(blocks, Embed, "kind")} == embed
    terms = {"NextToken", "LaterToken", "ModuleAhead", "ZLoss", "AuxiliaryLoss"}
    assert {term.__name__ for term in models(losses, LossTerm, "kind")} == terms
    assert set(catalog(kernels, Kernel)) >= {"torch", "torch_epilogue", "linear_triton", "gemm_evt"}
    assert {"round", "gptq", "int8", "none"} == {
        model.model_fields["scheme"].annotation.__args__[0] for model in models(quant, Scheme, "scheme")
    }  # type: ignore[union-attr]
    assert {"linear", "dgrad", "wgrad", "pointwise", "sdpa", "call", "fused", "scan"} <= set(classes(ops, Op))
