"""Checks a spec and reports all of its problems, each with a code, a position and a hint.

The modules that word Pydantic's errors are imported only for a spec that has some.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import TypeVar

from pydantic import ValidationError

from specc.compiler.errors import Diagnostic, SpecError
from specc.compiler.spec.migrate import refuse_old, upgraded
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import Path, Problem, StrictModel, keys_of
from specc.compiler.text.overrides import apply_overrides
from specc.compiler.text.source import Source, read

M = TypeVar("M", bound=StrictModel)

CODES: Mapping[str, str] = {
    "S001": "the file cannot be read",
    "S002": "the file is empty",
    "S003": "the text is too large, or nested too deeply",
    "S004": "the file is not UTF-8, or starts with a byte-order mark",
    "S005": "a character that is not printable",
    "S006": "a tab in the indentation",
    "S007": "the text is not YAML",
    "S008": "a key is used twice in one mapping",
    "S009": "an anchor, an alias or a merge key",
    "S010": "a tag or a directive",
    "S011": "more than one document",
    "S012": "a key that is not text",
    "S013": "a number with too many digits",
    "S014": "an override (`--set`) of a path that does not exist",
    "S101": "an unknown key",
    "S102": "a missing key",
    "S103": "a value of the wrong type",
    "S104": "a value out of range, or not one of the choices",
    "S105": "an unknown kind",
    "S106": "a value that its field does not accept",
    "S107": "an invalid expression",
    "S108": "a spec of an old version",
    "S201": "not exactly one of steps and budget_seconds",
    "S202": "a schedule that is longer than the run",
    "S203": "a promotion without a count or a byte budget",
    "S204": "a target that is listed twice",
    "S205": "not exactly one initialization of a parameter",
    "S206": "embedding steps that do not start with the only token table",
    "S207": "two parts of the model with the same name",
    "S210": "heads that do not divide the model's width",
    "S211": "kv_heads that do not divide heads",
    "S212": "RoPE over more dims than a head has",
    "S213": "RoPE over an odd number of dims",
    "S214": "not exactly one of ratio and hidden",
    "S215": "a width that is not a whole number, or too large",
    "S216": "a factor that is not finite in every layer",
    "S217": "a step that is not a whole number of micro-batches",
    "S218": "an evaluation window longer than the context, or a stride longer than the window",
    "S219": "a vocabulary without some of the tokens of the data",
    "S220": "an output of a run that does not exist",
    "S221": "an initialization that is negative, not finite, or too large for f32",
    "S222": "data that the model cannot read",
    "S223": "a context that is shorter than the lines",
    "S224": "not exactly one of tokens_per_step and batch",
    "S226": "a beam without a width, or a width without a beam",
    "S227": "teacher forcing of a model that is not an encoder_decoder",
    "S228": "a metric that the model does not have",
    "S229": "a warm-up or warm-down set in steps and as a fraction",
    "S230": "a layer that reads an encoder in a model without one",
    "S231": "rotary positions or a window in attention to another sequence",
    "S232": "a width that a form of attention does not have",
    "S233": "an encoder or decoder that does not start with its embedding stage",
    "S234": "a stage of an encoder that reads an encoder",
    "S235": "a stage of a decoder that reads later tokens",
    "S236": "a stage that reads a stage that does not exist",
    "S237": "a stage that cannot be in a loop over time",
    "S238": "a bridge without a recurrent stage on both sides",
    "S239": "a stage that needs a recurrent encoder",
    "S240": "a condition without a value, or one that holds in no layer",
    "S241": "a learned value without a shape, or `features` of one that reads no value",
    "S242": "RoPE over two dims with a trained length",
    "S243": "an order of blocks that does not exist, or that omits a block",
    "S244": "quantization-aware training of a model whose weights are not rounded",
    "S245": "promotion together with allocation, or an allocation without a byte budget",
    "S246": "an expression that reads a name that does not exist there",
    "S247": "a learned value that nothing reads, or two writes of one stream",
    "S248": "documents in a model of pairs of lines",
    "S249": "a document mark that is not an id of the vocabulary",
    "S250": "a schedule whose points do not start at 0 and increase, or leave the run",
    "S251": "a row length that does not divide the context, or rows that a model of lines does not have",
    "S254": "a change of a layer that does not exist, or a block without layers",
    "S253": "a decoder that does not read its encoder",
    "S259": "settings of an adaptation that contradict each other or the windows",
    "S260": "a setting of `source: self` with another calibration source",
    "S261": "`source: self` for a model that does not generate text",
    "S262": "calibration windows longer than the context",
    "S263": "a shape of the learning rate that rises",
    "S264": "a loss without the next token, or with a term twice",
    "S265": "a term of the loss that no layer states",
    "S266": "a loss to stop at without validations",
    "S267": "a schedule in a model of pairs of lines",
    "S268": "an allocation with a single option",
    "S269": "a start that the run or its schedule does not reach",
    "S270": "rotary frequencies without a value",
    "S271": "a score that is not an expression of s, or that reads outside of a table",
    "S272": "a mask of documents without the id that starts one, or the id without such a mask",
    "S273": "rounded inputs with budget_seconds and warmdown_steps",
    "S274": "rounded inputs in a loop over time that is not a single LSTM",
    "S275": "a score or a mask of attention that is not causal",
    "S276": "a mask that lets a query attend to a later key",
    "S277": "TF32 for a model that does not compute in f32",
    "S278": "too few steps for the method of Muon",
    "S279": "a prefix that nothing reads, or settings that do not go with a prefix",
    "S285": "a norm in an invalid place",
    "S286": "experts that a token cannot choose, of a width without a product, or a router that cannot learn",
    "S287": "coefficients of Muon that no iteration reads, or that diverge",
    "S288": "an optimizer that never updates, or a cautious decay of 0",
    "S289": "pooled keys of a block that the model does not have, or settings that do not go with the pooling",
    "S290": "a cache in pages, and a layer with another state",
    "S293": "settings of precision that contradict each other or the model",
    "S294": "a rule of 8-bit products that matches none",
    "S301": "two parts of the model with different widths",
    "S302": "a fusion point that matches nothing",
    "S303": "a fusion point that matches only some of the blocks that share their code",
    "S304": "a fusion point that cannot be fused",
    "S305": "a pattern of quantization or of test-time training that matches no parameter",
    "S306": "two quantization rules that match the same parameter",
    "S307": "a parameter that its quantization scheme does not support",
    "S311": "a promotion, an allocation or a correction that no matched parameter can have",
    "S312": "an int8 parameter that is not only read by int8 products",
    "S308": "an optimizer that matches no remaining parameter",
    "S309": "an optimizer that cannot update a parameter it matches",
    "S310": "a parameter without an optimizer",
    "S401": "a node that no kernel of a target computes",
    "S402": "an epilogue that cannot be named",
    "S403": "two epilogues with the same name",
    "S501": "two settings of a sweep with the same name or the same spec",
    "S502": "a seed of a sweep that is listed twice, or that a setting also sets",
    "S503": "a quantization of a setting that the sweep does not have, or of more than `quant`",
}


def load(origin: FilePath | str, overrides: Iterable[str] = ()) -> tuple[Spec, Source]:
    """Returns the checked spec of a file (a path) or of a text (a string), and the source, which has the position of
    each value.

    `overrides` are texts `path=value`, which are applied before the check. Raises SpecError with all problems if the
    spec is invalid or has an old version.
    """
    source = read(origin)
    refuse_old(source)
    source = apply_overrides(source, overrides)
    return check(source), source


def load_recorded(path: FilePath, overrides: Iterable[str] = ()) -> tuple[Spec, Source, bool]:
    """Loads the spec that a run recorded. Returns the spec, the source, and whether the file has an old version.

    A spec of an old version is rewritten in memory.
    """
    source = read(path)
    data = upgraded(source.data)
    old = data is not source.data
    if old:
        source = Source(source.file, source.text, data)
    source = apply_overrides(source, overrides)
    return check(source), source, old


def check(source: Source) -> Spec:
    """Returns the spec of a source. Raises SpecError with all problems (codes S1xx and S2xx) if the source is
    invalid."""
    return check_as(Spec, source)


def check_as(model: type[M], source: Source) -> M:
    """Returns the content of a source as a model. Raises SpecError with all problems if the source is invalid."""
    try:
        value = model.model_validate(source.data)
    except ValidationError as error:
        from specc.compiler.spec.messages.expected import places
        from specc.compiler.spec.messages.pydantic_errors import diagnostics_of

        models = dict(places(model, source.data))
        diagnostics, faulty = diagnostics_of(error, source, models, model)
        problems = _problems_of_sound_parts(source, models, faulty)
        raise SpecError((*diagnostics, *to_diagnostics(problems, source)), source.texts) from None
    if diagnostics := to_diagnostics(problems_of(value), source):
        raise SpecError(diagnostics, source.texts)
    return value


def to_diagnostics(problems: Iterable[Problem], source: Source) -> tuple[Diagnostic, ...]:
    """Returns the problems as diagnostics with the positions of their paths in the source.

    A related note is dropped if it is in another file than the problem, e.g. in an override.
    """
    return tuple(_placed(problem, source) for problem in problems)


def problems_of(value: object, path: Path = ()) -> Iterator[Problem]:
    """Yields the problems that involve several fields, for every model in `value`. Paths are relative to the root."""
    if isinstance(value, StrictModel):
        yield from (problem.under(*path) for problem in value.problems())
        for key, name in zip(keys_of(type(value)), type(value).model_fields, strict=True):
            yield from problems_of(getattr(value, name), (*path, key))
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from problems_of(item, (*path, i))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from problems_of(item, (*path, key))


def _problems_of_sound_parts(
    source: Source, models: Mapping[Path, type[StrictModel]], faulty: frozenset[Path]
) -> Iterator[Problem]:
    """Yields the problems that involve several fields, for the parts of a spec without Pydantic errors."""
    sound: list[Path] = []
    for path, model in models.items():
        broken = any(fault[: len(path)] == path for fault in faulty)
        if broken or any(path[: len(outer)] == outer for outer in sound):
            continue
        data: object = source.data
        for part in path:
            data = data[part]  # type: ignore[index]
        try:
            value = model.model_validate(data)
        except ValidationError:  # reported at another path: the part may belong to several kinds of model
            continue
        sound.append(path)
        yield from problems_of(value, path)


def _placed(problem: Problem, source: Source) -> Diagnostic:
    place = source.inside(problem.path, problem.offset) if problem.offset else source.place(problem.path)
    near = ((note, source.place(path)) for note, path in problem.related)
    related = tuple((note, at.mark) for note, at in near if at.file == place.file)
    return Diagnostic(problem.code, problem.message, problem.hint, place.file, place.mark, related)
