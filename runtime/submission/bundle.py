"""Builds train_gpt.py, a single file with the entry program, the needed parts of specc, the model and the plan.

The code is extracted from the sources of specc without docstrings and annotations (see shake.py), and compressed. When
train_gpt.py starts, it unpacks the code into a temporary folder, because Triton and nvcc read sources from files. The
file has the encoding Latin-1, in which each character of a string literal stores one compressed byte.
"""

import bz2
import dataclasses
import json
import lzma
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import specc.compiler
import specc.runtime
from specc.compiler.build import canonical, compiled
from specc.compiler.ops import dropout, fp8
from specc.compiler.passes.assign_quant import reused
from specc.compiler.pipeline import lower
from specc.compiler.plan.lock import Lock
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.spec import SCHEMES, QuantSpec, Spec
from specc.compiler.spec.train import BitsSpec
from specc.compiler.strict import StrictModel
from specc.compiler.targets import TARGETS
from specc.runtime.artifact.codecs import Codec, compress
from specc.runtime.artifact.deployment import Deployment
from specc.runtime.data.tokenizers.tokenizer import PieceBytes, Tokenizer
from specc.runtime.model.load import initial_values
from specc.runtime.optim.optimizers import rule_of
from specc.runtime.quantize.assignment import base_schemes, resolved
from specc.runtime.submission.flatten import Symbol
from specc.runtime.submission.shake import Shaker

PACKAGE = "parts"
JOINED = "main"  # the module that contains the entry program and all functions of specc that it needs
ENTRY = "specc.runtime.submission.entry"
PLAN = "specc.runtime.submission.plan"
_KNOWN = "specc.runtime.submission.known"
REPLACED: Mapping[Symbol, Symbol] = {
    ("pydantic", None): ("specc.runtime.submission.records", None),
    ("platformdirs", None): (_KNOWN, None),
    ("specc.compiler.records", "record"): (_KNOWN, "record"),
    ("specc.compiler.passes.optimizers", "owners"): (_KNOWN, "owners"),
    ("specc.runtime.optim.optimizers", "rule_of"): (_KNOWN, "rule_of"),
    ("specc.compiler.changing_values", "formula"): (_KNOWN, "formula"),
    ("specc.compiler.changing_values", "formula_at"): (_KNOWN, "formula_at"),
    ("specc.runtime.data.missing_paths", "missing_source"): (_KNOWN, "missing_source"),
    ("specc.runtime.data.shards.token_cache", "open_cached"): (_KNOWN, "open_cached"),
    ("specc.runtime.data.shards.record", "parsed"): (_KNOWN, "parsed"),
    ("specc.runtime.storage.committed", "in_words"): (_KNOWN, "in_words"),
}


@dataclasses.dataclass(frozen=True)
class _Facts:
    """The properties of a submission that determine which functions it needs.

    Attributes:
        spec, quant: the spec, and its section `quant`.
        base: the storage scheme of each parameter according to the rules of the spec.
        reused: the names of the parameters that several matrix products read. Calibration measures the inputs of each
            of these products separately.
        experts: whether the model has experts.
        gpu: whether a target is a GPU.
        rounds: whether training fake-quantizes weights.
    """

    spec: Spec
    quant: QuantSpec
    base: Mapping[str, Scheme]
    reused: frozenset[str]
    experts: bool
    gpu: bool
    rounds: bool

    @property
    def writes_text(self) -> bool:
        return self.quant.calibrate.source == "self"

    @property
    def packs(self) -> bool:
        return getattr(self.spec.train.data, "order", None) == "best_fit"

    @property
    def corrects(self) -> bool:
        ranks = (getattr(scheme, "correction_rank", 0) for scheme in self.base.values())
        return self.quant.correct is not None or any(ranks)


# Functions and classes that only some submissions need, each with the condition under which it is needed.
_WHEN_USED: Mapping[Symbol, Callable[[_Facts], bool]] = {
    ("specc.runtime.quantize.written_text", "write_text"): lambda facts: facts.writes_text,
    ("specc.runtime.quantize.promotion", "promote"): lambda facts: facts.quant.allocate is None,
    ("specc.runtime.quantize.bit_allocation", "allocate_bits"): lambda facts: facts.quant.allocate is not None,
    ("specc.runtime.calibration.added_nats", "added_nats"): lambda facts: facts.quant.allocate is not None,
    ("specc.runtime.calibration.uses", "capture_uses"): lambda facts: bool(facts.reused),
    ("specc.runtime.quantize.bit_allocation", "largest_errors"): lambda facts: facts.quant.correct is not None,
    ("specc.compiler.quant.low_rank", "correction"): lambda facts: facts.corrects,
    ("specc.compiler.quant.low_rank", "product"): lambda facts: facts.corrects,
    ("specc.compiler.quant.low_rank", "stored"): lambda facts: facts.corrects,
    ("specc.runtime.train.loss_scale", "LossScale"): lambda facts: facts.spec.train.precision.scaling is not None,
    ("specc.runtime.metrics.expert_load", "expert_loads"): lambda facts: facts.experts,
    ("specc.runtime.metrics.expert_load", "imbalance"): lambda facts: facts.experts,
    ("specc.runtime.metrics.loss_terms", "loss_terms"): lambda facts: len(facts.spec.train.losses) > 1,
    ("specc.runtime.optim.average", "Average"): lambda facts: facts.spec.train.average is not None,
    ("specc.runtime.optim.fake_quantized", "FakeQuantized"): lambda facts: facts.rounds,
    ("specc.runtime.data.windows.packing", "best_fit"): lambda facts: facts.packs,
    ("specc.runtime.data.windows.packing", "document_starts"): lambda facts: facts.packs,
    ("specc.runtime.data.windows.packing", "lengths_from"): lambda facts: facts.packs,
    ("specc.runtime.data.windows.packing", "read_row"): lambda facts: facts.packs,
    ("specc.runtime.model.cuda_graph", "Captured"): lambda facts: facts.gpu or facts.writes_text,
}
NATIVE = ("specc.runtime.support.native", "compile_ahead")
IN_ORDER = ("specc.runtime.train.recompute_order", "in_order")
_BUFFERS: Mapping[str, Symbol] = {
    fp8.STORAGE: ("specc.runtime.train.fp8_scales", "Fp8Scales"),
    dropout.STORAGE: ("specc.runtime.train.dropout_draws", "DropoutDraws"),
}  # the classes that set buffers of a model, by the storage format of the buffers
LZMA: Mapping[str, int] = {"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "lc": 3, "lp": 0, "pb": 0}
MATCHES = (48, 64, 96, 128, 273)  # values of LZMA's nice_len to try; the best value depends on the data
# Matches C++ string and character literals, which are kept, and comments, which are removed.
_CUDA_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
STUB = """\
# coding: latin-1
import {module},os,shutil,sys,tempfile
if __name__=="__main__":
 d=tempfile.mkdtemp(prefix="train_gpt-");sys.path.insert(0,d)
 try:
  f={module}.decompress('''{data}'''.encode("latin-1")).decode().split("\\0")
  for n,t in zip(f[::2],f[1::2]):
   p=os.path.join(d,"{package}",n);os.makedirs(os.path.dirname(p),exist_ok=True)
   with open(p,"w",encoding="utf-8") as f:f.write(t)
  from {package}.{entry} import main
  c=main()
 finally:shutil.rmtree(d,ignore_errors=True)
 sys.exit(c)
"""


def train_gpt(spec: Spec, lock: Lock, targets: Sequence[str], tokenizer: Tokenizer, codec: Codec) -> bytes:
    """Returns the content of train_gpt.py: a Python source in Latin-1.

    Args:
        spec: the spec of the run before quantization has chosen the bits.
        lock: the kernels that `specc tune` measured as the fastest.
        targets: the targets to generate code for.
        tokenizer: the tokenizer. Its byte table is included.
        codec: the compression of the weights that the program writes.

    Returns:
        The content of the file.

    Raises:
        ShakeError: if the sources of specc contain a construct that shake.py does not support.
    """
    files = modules(spec, lock, targets, tokenizer, codec)
    data = "\0".join(part for file in files.items() for part in file).encode()
    filters = [{**LZMA, "nice_len": length} for length in MATCHES]
    choices = [("lzma", lzma.compress(data, lzma.FORMAT_ALONE, filters=[chain])) for chain in filters]
    if codec == Codec.BROTLI:  # the program needs brotli anyway, to compress the weights
        choices.append(("brotli", compress(data, 11)))
    module, packed = min([("bz2", bz2.compress(data)), *choices], key=lambda choice: len(choice[1]))
    return STUB.format(module=module, data=quoted(packed), package=PACKAGE, entry=JOINED).encode("latin-1")


def quoted(data: bytes) -> str:
    """Returns the content of a triple-quoted string literal whose characters are the bytes of `data`.

    NUL, CR and characters with a special meaning are escaped.
    """
    text = data.decode("latin-1")
    text = re.sub(r"\\|'(?=''|\Z)", lambda match: "\\" + match[0], text)
    text = re.sub(r"\0(?=[0-7])", r"\\x00", text).replace("\0", r"\0")
    return text.replace("\r", r"\r")


def modules(spec: Spec, lock: Lock, targets: Sequence[str], tokenizer: Tokenizer, codec: Codec) -> dict[str, str]:
    """Returns the files of the package that train_gpt.py unpacks.

    Args:
        spec: the spec of the run before quantization has chosen the bits.
        lock: the kernels that `specc tune` measured as the fastest.
        targets: the targets to generate code for.
        tokenizer: the tokenizer. Its byte table is included.
        codec: the compression of the weights that the program writes.

    Returns:
        The source texts by path, in the order that compresses best.

    Raises:
        ShakeError: if the sources of specc contain a construct that shake.py does not support.
    """
    facts = _facts(spec, targets)
    plan, generated, storages = _plan(facts, lock, targets, tokenizer, codec)
    unused = {symbol: (_KNOWN, "unused") for symbol, calls in _WHEN_USED.items() if not calls(facts)}
    if not any(name.endswith(".cu") for name in generated):
        unused[NATIVE] = (_KNOWN, "nothing")
    if not spec.train.recompute:
        unused[IN_ORDER] = (_KNOWN, "nothing")
    idle = {symbol: (_KNOWN, "NoBuffers") for storage, symbol in _BUFFERS.items() if storage not in storages}
    shaker = Shaker("specc", {**_sources(), PLAN: plan}, {**REPLACED, **unused, **idle}, f"{PACKAGE}.{JOINED}")
    shaker.reach(ENTRY, "main")
    files = {}
    for name, text in generated.items():
        if name.endswith(".py"):
            shaker.include(name, text)
        else:
            files[name] = _without_comments(text)
    return dict(sorted({**files, **shaker.texts((ENTRY, "main"))}.items(), key=_beside_similar))


def _beside_similar(file: tuple[str, str]) -> tuple[bool, str, bool, str, str]:
    path = PurePosixPath(file[0])
    return path.stem == JOINED, path.suffix, len(path.parts) > 1, path.name, file[0]


def _without_comments(text: str) -> str:
    code = _CUDA_TOKEN.sub(lambda token: "" if token[0].startswith("/") else token[0], text)
    return "".join(f"{line.strip()}\n" for line in code.splitlines() if line.strip())


def _sources() -> dict[str, str]:
    texts: dict[str, str] = {}
    for package in (specc.compiler, specc.runtime):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            inner = parts[:-1] if parts[-1] == "__init__" else parts
            texts[".".join((package.__name__, *inner))] = path.read_text(encoding="utf-8")
    return texts


def _facts(spec: Spec, targets: Sequence[str]) -> _Facts:
    assert spec.quant is not None
    programs = lower(spec, targets[0])
    base = base_schemes(spec.quant, programs.params)
    solved = {name for name, scheme in base.items() if scheme.needs_hessian}
    experts = any(len(parameter.shape) == 3 for parameter in programs.params)
    gpu = any(TARGETS[target].arch for target in targets)
    rounds = spec.train.qat is not None or any(phase.rounds for phase in programs.phases)
    return _Facts(spec, spec.quant, base, reused(programs) & solved, experts, gpu, rounds)


def _plan(
    facts: _Facts, lock: Lock, targets: Sequence[str], tokenizer: Tokenizer, codec: Codec
) -> tuple[str, dict[str, str], set[str]]:
    spec, quant, base = facts.spec, facts.quant, facts.base
    assert isinstance(spec.eval, BitsSpec)
    built, unfused = (compiled(each, targets, lock) for each in (spec, spec.plain))
    programs = {target: plan.programs for target, plan in built.plans.items()}
    params = {
        target: [dataclasses.replace(p, init=None, storage="") for p in program.params]  # type: ignore[arg-type]
        for target, program in programs.items()
    }
    first = programs[targets[0]]
    deployed = resolved(spec, base)
    pieces = tokenizer.piece_bytes()
    described = (tokenizer.name, tokenizer.vocab, tokenizer.bos, tokenizer.lossless, tokenizer.digest())
    kinds = {str(scheme.model_fields["scheme"].default): scheme for scheme in SCHEMES.models}
    used = {word: kind for word, kind in kinds.items() if any(type(scheme) is kind for scheme in base.values())}
    values = {
        "NAME": spec.name,
        "CODEC": int(codec),
        "TARGETS": tuple(targets),
        "WINDOW": spec.model.window,
        "UNSCORED": spec.model.unscored,
        "TRAIN": spec.train.model_copy(update={"validate_every": 0, "checkpoint_every": 0}),
        "EVAL": spec.eval,
        "PHASES": first.phases,
        "QUANT": quant.model_copy(update={"rules": (), "default": None}),
        "PARAMS": params,
        "DERIVED": {target: program.derived_weights for target, program in programs.items()},
        "INITS": initial_values(first),
        "REUSED": sorted(facts.reused),
        "BASE": base,
        "SCHEMES": used,
        "RULES": {optimizer.kind: rule_of(optimizer) for optimizer in spec.train.optimizers},
        "SPEC": _without_rules(deployed),
        "SPEC_DIGEST": "",
        "CODE": Deployment.of(deployed).code,
        "TOKENIZER": described,
        "PIECES": _piece_table(pieces),
        "BOUNDARIES": pieces.boundary.nonzero()[0].tolist(),
    }
    classes: set[type] = set()
    lines = [f"{name} = {spelled(value, classes)}" for name, value in values.items()]
    imports = sorted(f"from {kind.__module__} import {kind.__name__}" for kind in classes)
    generated = {
        f"{folder}{suffix}/{file}": text
        for build, suffix in ((built, ""), (unfused, "_plain"))
        for name, text in build.files.items()
        for folder, _, file in [name.rpartition("/")]
        if folder in targets
    }
    storages = {type.storage for program in programs.values() for _, type in program.buffers}
    return "\n".join((*imports, *lines)) + "\n", generated, storages


def _without_rules(spec: Spec) -> str:
    data = json.loads(canonical(spec))
    data["quant"]["rules"] = []
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _piece_table(pieces: PieceBytes) -> str:
    """Returns a text with one character per token id, which states the size of the token.

    The character has the code point `32 + 2 * n + s`. `n` is the number of bytes of the token without a leading space.
    `s` is 1 if the token has a leading space, and 0 otherwise.
    """
    marks = zip(pieces.base.tolist(), pieces.leading_space.tolist(), strict=True)
    return "".join(chr(32 + 2 * size + space) for size, space in marks)


def spelled(value: Any, classes: set[type]) -> str:
    """Returns a Python expression for `value`.

    `value` may be an instance of a settings class, a number, a text, or a tuple, list or mapping of such values. The
    function adds the classes that occur in the expression to `classes`. The expression omits fields with default
    values. Raises TypeError if `value` has another type.
    """

    def call(kind: type, fields: Iterable[tuple[str, Any]]) -> str:
        classes.add(kind)
        return f"{kind.__name__}({', '.join(f'{name}={spelled(field, classes)}' for name, field in fields)})"

    if isinstance(value, StrictModel):
        fields = type(value).model_fields
        return call(type(value), [(n, v) for n, v in value if fields[n].is_required() or v != fields[n].default])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(item, getattr(value, item.name)) for item in dataclasses.fields(value)]
        return call(type(value), [(item.name, inner) for item, inner in items if inner != item.default])
    if isinstance(value, type):
        classes.add(value)
        return value.__name__
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{spelled(k, classes)}: {spelled(v, classes)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(spelled(item, classes) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if value is None or isinstance(value, str | int | float | bool | bytes):
        return repr(value)
    raise TypeError(f"a submission cannot contain a value of type {type(value).__name__}")
