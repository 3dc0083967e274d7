"""Checks a spec and reports all of its problems, each with a code, a position and a hint."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as FilePath

from pydantic import ValidationError

from specc.compiler.errors import Diagnostic, SpecError
from specc.compiler.spec.messages.expected import Model, keys_of, places
from specc.compiler.spec.messages.pydantic_errors import diagnostics_of
from specc.compiler.spec.migrate import refuse_old, upgraded
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import Path, Problem, StrictModel
from specc.compiler.text.overrides import apply_overrides
from specc.compiler.text.source import Source, read

CODES: Mapping[str, str] = {
    "S001": "the file cannot be read",
    "S002": "the file is empty",
    "S003": "the text is too large, or nested too deeply",
    "S004": "the file is not UTF-8, or starts with a byte-order mark",
    "S005": "a character that does not show on a screen",
    "S006": "a tab in the indentation",
    "S007": "the text is not YAML",
    "S008": "a key stands twice in one mapping",
    "S009": "an anchor, an alias or a merge key",
    "S010": "a tag or a directive",
    "S011": "more than one document",
    "S012": "a key that is no word",
    "S013": "a number with too many digits",
    "S014": "an override (`--set`) that names nothing",
    "S101": "an unknown key",
    "S102": "a missing key",
    "S103": "a value of the wrong type",
    "S104": "a value out of range, or not one of the choices",
    "S105": "an unknown kind",
    "S106": "a value that its field refuses",
    "S107": "an expression that cannot be read",
    "S108": "a spec of an old version",
    "S201": "a run that does not end by exactly one of steps and budget_seconds",
    "S202": "a schedule that is longer than the run",
    "S203": "a promotion without a count or a byte budget",
    "S204": "a target that is listed twice",
    "S205": "not exactly one way to start a parameter",
    "S206": "embedding steps in an order that makes no sense",
    "S207": "two parts of the model with one name",
    "S210": "heads that do not divide the model's width",
    "S211": "kv_heads that do not divide heads",
    "S212": "RoPE over more dims than a head has",
    "S213": "RoPE over an odd number of dims",
    "S214": "not exactly one of ratio and hidden",
    "S215": "a width that is no whole number, or too large",
    "S216": "a factor that is no finite number in every layer",
    "S217": "a step that is no whole number of micro-batches",
    "S218": "a window of the evaluation that is longer than the context, or a stride than the window",
    "S219": "a vocabulary that lacks some of the data's tokens",
    "S220": "an output of a run that does not exist",
    "S221": "a start of a parameter that no numbers have",
    "S222": "data that the model cannot read",
    "S223": "a context that is shorter than the lines",
    "S224": "a step without exactly one size",
    "S225": "teacher forcing whose points do not begin at 0 and go up",
    "S226": "a beam without a width, or a width without a beam",
    "S227": "teacher forcing of a model that has no teacher",
    "S228": "a metric that the model does not have",
    "S229": "a warm-up or a warm-down that is given in steps and as a fraction",
    "S230": "a layer that reads an encoder, where there is none",
    "S231": "rotary positions or a window in attention to another sequence",
    "S232": "a width that a form of attention does not have",
    "S233": "a side that does not start with what reads its tokens",
    "S234": "a stage of an encoder that reads an encoder",
    "S235": "a stage of a decoder that reads later tokens",
    "S236": "a stage that reads another which is not there",
    "S237": "a stage that cannot be in a loop over time",
    "S238": "a bridge without two sides",
    "S239": "a stage that wants a recurrent encoder",
    "S240": "a condition without a value, or one that holds in no layer",
    "S241": "a gate that reads more features than there are",
    "S242": "RoPE over two dims with a length that it was trained on",
    "S243": "an order of blocks that does not exist, or that omits a block",
    "S244": "quantization-aware training of a model that is not quantized, or keeps all its weights as they are",
    "S245": "bits that are given both by promotion and by allocation, or an allocation without a budget",
    "S246": "an expression that reads a name that does not exist there",
    "S247": "a learned value that nothing reads, or two writes of one stream",
    "S248": "documents in a model of pairs of lines",
    "S249": "a mark of documents that is no id",
    "S250": "lengths of rows that do not begin with the run, or go back",
    "S251": "a length of rows that windows cannot be cut into",
    "S252": "wiring of a stage that has no residual branch",
    "S254": "a change of a layer that does not exist",
    "S255": "blocks whose caches differ",
    "S253": "a decoder that reads nothing of its encoder",
    "S259": "a way to adapt to a text whose settings, or whose windows, do not go together",
    "S260": "a setting of text that the model writes itself, where it is calibrated on other text",
    "S261": "a model that writes no text, to be calibrated on its own",
    "S262": "calibration windows longer than the context",
    "S268": "bits to allocate among one width",
    "S269": "what begins late in the warm-down, with a schedule that never goes so far down",
    "S273": "inputs to be rounded from a share of the run on that no schedule by the clock has",
    "S274": "inputs to be rounded in every step of a training loop that is no LSTM",
    "S277": "TF32 for a model whose products are not of f32 numbers",
    "S278": "steps of Muon in which its method makes no iteration",
    "S301": "two parts of the model whose widths do not fit",
    "S302": "a fusion point that matches nothing",
    "S303": "a fusion point that covers only some of the blocks that share their code",
    "S304": "a fusion point that cannot be fused",
    "S305": "a rule or wish of quantization, or test-time training, that matches no parameter",
    "S306": "two quantization rules for one parameter",
    "S307": "a parameter that its quantization scheme cannot take",
    "S311": "a promotion, an allocation or a correction of what cannot have it",
    "S312": "a parameter in int8 that something else than a product in int8 reads",
    "S308": "an optimizer that no parameter is left for",
    "S309": "an optimizer that cannot take a parameter",
    "S310": "a parameter without an optimizer",
    "S401": "a node that no kernel of a target takes",
    "S402": "an epilogue that cannot be named",
    "S403": "two epilogues with one name",
}


def load(origin: FilePath | str, overrides: Iterable[str] = ()) -> tuple[Spec, Source]:
    """Returns the checked spec of a file (a path) or a text (a string), and its source with the position of each value.

    `overrides` are `path=value` texts that are applied first. Raises SpecError with all problems if the spec is
    invalid, or of an old version.
    """
    source = read(origin)
    refuse_old(source)
    source = apply_overrides(source, overrides)
    return check(source), source


def load_recorded(path: FilePath, overrides: Iterable[str] = ()) -> tuple[Spec, Source, bool]:
    """Returns the spec that a run recorded, its source, and whether it is of an old version, as `load` does.

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
    """Returns the spec of a source. Raises SpecError with all problems if its data is invalid (codes S1xx and S2xx)."""
    try:
        spec = Spec.model_validate(source.data)
    except ValidationError as error:
        models = dict(places(Spec, source.data))
        diagnostics, faulty = diagnostics_of(error, source, models, Spec)
        problems = _problems_of_sound_parts(source, models, faulty)
        raise SpecError((*diagnostics, *to_diagnostics(problems, source)), source.texts) from None
    if diagnostics := to_diagnostics(problems_of(spec), source):
        raise SpecError(diagnostics, source.texts)
    return spec


def to_diagnostics(problems: Iterable[Problem], source: Source) -> tuple[Diagnostic, ...]:
    """Returns the problems as diagnostics with the positions of their paths in the source.

    A related note is dropped if it is in another file than its problem, e.g. in an override.
    """
    return tuple(_placed(problem, source) for problem in problems)


def problems_of(value: object, path: Path = ()) -> Iterator[Problem]:
    """Yields the problems that involve several fields, of every model in `value`, with paths from the root."""
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
    source: Source, models: Mapping[Path, Model], faulty: frozenset[Path]
) -> Iterator[Problem]:
    """Yields the problems that involve several fields, of the parts of a spec that have no Pydantic error."""
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
    place = source.place(problem.path)
    near = ((note, source.place(path)) for note, path in problem.related)
    related = tuple((note, at.mark) for note, at in near if at.file == place.file)
    return Diagnostic(problem.code, problem.message, problem.hint, place.file, place.mark, related)
