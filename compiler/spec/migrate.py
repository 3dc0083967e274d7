"""Rewrites specs of version 1, and old keys of version 2. Parameters, programs and scores of the model do not
change."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.tokens import CommentToken

from specc.compiler.expr import Binary, Var, parse, substitute
from specc.compiler.expr.wiring import parse_wiring
from specc.compiler.spec.version import VERSION, has_tf32, of_version_1
from specc.compiler.strict import as_tuples
from specc.compiler.text.round_trip import editable, edited, flow
from specc.compiler.text.source import read

OLD = ("skips", "mix", "loop", "parallel", "lanes")  # keys of blocks in version 1
Data = MutableMapping[str, Any]


def upgraded(data: Any) -> Any:
    if not of_version_1(data) and not has_tf32(data):
        return data
    new = _plain(data)
    migrate(new)
    return as_tuples(new)


def _move_tf32(train: Data) -> None:
    if not isinstance(train, CommentedMap):
        train["precision"] = {"tf32": train.pop("tf32")}
        return
    place, comment = list(train).index("tf32"), train.ca.items.get("tf32")
    train.insert(place, "precision", flow({"tf32": train.pop("tf32")}))
    if comment is not None:
        train.ca.items["precision"] = comment


def migrated_text(path: FilePath) -> str | None:
    """Returns the text of a spec file in the current version, with its comments. Returns None if the file already has
    this version.

    Raises:
        SpecError: If the file is not a spec of version 1.
    """
    source = read(path)
    if upgraded(source.data) is source.data:
        return None
    data = editable(source.text)
    blocks = [part for part, _ in _block_sections(data) if isinstance(part, CommentedMap)]
    removed = [(part, [part.ca.items.get(key) for key in OLD if key in part]) for part in blocks]
    migrate(data)
    for part, comments in removed:
        texts = [
            token.value.strip() for items in comments if items for token in items if isinstance(token, CommentToken)
        ]
        new = next((key for key in ("read", "changes", "order", "between") if key in part), None)
        if texts and new is not None:
            part.yaml_set_comment_before_after_key(new, "\n".join(text.lstrip("# ") for text in texts), indent=4)
        for key in ("learn", "order"):
            if key in part:
                part[key] = flow(part[key])
        if "common" in part:
            part["common"] = {name: flow(value) for name, value in part["common"].items()}
        for key in ("changes", "between"):
            part[key] = [{name: flow(value) for name, value in entry.items()} for entry in part.get(key, ())]
            if not part[key]:
                del part[key]
        for layer in part.get("layers", ()):
            if "learn" in layer:
                layer["learn"] = flow(layer["learn"])
    for stage in _stages(data):
        if "learn" in stage:
            stage["learn"] = flow(stage["learn"])
    return with_all_comments(source.text, edited(data))


def with_all_comments(old: str, new: str) -> str:
    """Returns `new` with the comments of `old` that belonged to removed keys.

    Such a comment is inserted before the next line of `old` that occurs exactly once in `new`.
    """
    olds, lines = [_code_and_comment(line) for line in old.splitlines()], new.splitlines()
    present = Counter(comment for _, comment in map(_code_and_comment, lines))
    for place, (_, comment) in enumerate(olds):
        if present[comment]:
            present[comment] -= 1
        elif comment:
            codes = [code for code, _ in map(_code_and_comment, lines)]
            after = (codes.index(code) for code, _ in olds[place:] if code and codes.count(code) == 1)
            line = next(after, len(lines))
            margin = re.match(" *", lines[line] if line < len(lines) else "")
            lines.insert(line, f"{margin[0] if margin else ''}{comment}")
    return "\n".join(lines) + "\n"


def _code_and_comment(line: str) -> tuple[str, str]:
    match = re.search(r"(?:^|\s)(#.*)$", line)
    return (line[: match.start()].strip(), match[1].strip()) if match else (line.strip(), "")


def migrate(data: Data) -> None:
    """Rewrites the data of an old spec in place. Unknown fields stay, and are reported when the spec is read."""
    if has_tf32(data):
        _move_tf32(data["train"])
    if not of_version_1(data):
        return
    data["spec_version"] = VERSION
    model = data.get("model")
    for part in (
        *([model] if isinstance(model, MutableMapping) else ()),
        *(blocks for blocks, _ in _block_sections(data)),
    ):
        norm = part.get("norm")
        if isinstance(norm, MutableMapping):
            if norm.pop("affine", False):
                norm["weight"] = "w"
            if part.get("parallel"):
                norm["shared"] = True
    _turn_backward(data.get("model"))
    _migrate_masks(model)
    for blocks, dim in _block_sections(data):
        _migrate_blocks(blocks, dim)
    for stage in _stages(data):
        _migrate_gate(stage)
        if isinstance(values := stage.pop("values", None), Mapping):
            learned, fields = _value_embedding(_title(stage), values, "values")
            _merge(stage, {"learn": learned})
            _merge(stage, fields)
    if isinstance(train := data.get("train"), MutableMapping):
        _migrate_train(train)


def _turn_backward(part: Any) -> None:
    if isinstance(part, MutableMapping):
        if isinstance(part.get("rope"), MutableMapping):
            part["rope"]["turn"] = "backward"
        part = list(part.values())
    for inner in part if isinstance(part, list) else ():
        _turn_backward(inner)


def _migrate_masks(part: Any) -> None:
    for inner in part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ():
        _migrate_masks(inner)
    if not isinstance(part, MutableMapping) or part.get("kind") != "attention" or part.get("of") == "encoder":
        return
    window = part.get("window")
    conditions = [f"i - j < {window}"] if isinstance(window, int) and not isinstance(window, bool) else []
    conditions += ["document(i) == document(j)"] if part.get("bos") is not None else []
    if conditions and "mask" not in part:
        part["mask"] = " and ".join(("j <= i", *conditions))
    if window is None or conditions:
        part.pop("window", None)


def _stages(data: Data) -> Iterator[Data]:
    model = data.get("model")
    sides = [model.get(side) or () for side in ("encoder", "decoder")] if isinstance(model, MutableMapping) else []
    for part in (part for side in sides for part in side):
        if isinstance(part, MutableMapping) and part.get("kind") == "attention":
            yield part


def _block_sections(data: Data) -> Iterator[tuple[Data, Any]]:
    model = data.get("model")
    if isinstance(model, MutableMapping):
        if isinstance(model.get("blocks"), MutableMapping):
            yield model["blocks"], model.get("dim")
        for side in ("encoder", "decoder"):
            stages = [part for part in model.get(side) or () if isinstance(part, MutableMapping)]
            dim = next((part["dim"] for part in stages if "dim" in part), None)
            yield from ((part, dim) for part in stages if part.get("kind") == "blocks")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _migrate_blocks(blocks: Data, dim: Any) -> None:
    layers = [layer for layer in blocks.get("layers") or () if isinstance(layer, MutableMapping)]
    count = blocks.get("count")
    if not isinstance(count, int) or not layers:
        return
    for part in layers:
        _migrate_gate(part)
    changes = list(_layer_lists(blocks, layers, count, dim))
    mix, skips = blocks.pop("mix", None), blocks.pop("skips", None)
    lanes, parallel = blocks.pop("lanes", None), blocks.pop("parallel", None) or ()
    loops = "loop" in blocks
    loop = blocks.pop("loop", None)
    branches = {_title(layer): _residual(layer) for layer in layers}
    if mix is not None:
        blocks["learn"] = {"mix.stream": {"init": 1}, "mix.embedded": {"init": 0}}
        blocks["read"] = _mixed("x")
    gated = isinstance(skips, Mapping) and bool(skips.get("gated"))
    looped = loops and loop is not None
    half = count // 2
    fields: list[dict[str, Any]] = []
    for layer in range(count):
        skipped = skips is not None and not looped and half <= layer < 2 * half
        source = f"output({2 * half - 1} - layer)"
        change: dict[str, Any] = {"learn": _skip_values(gated, "skip.")} if skipped else {}
        if isinstance(lanes, Mapping) and layer >= lanes["first"]:
            skip = (lambda x, source=source: _skipped(x, source, gated, "skip.")) if skipped else None
            change = _lane_fields(change, lanes, layer, count, branches, mix is not None, skip)
        elif skipped:
            x = _skipped("x", source, gated, "skip.")
            change["read"] = _mixed(x) if mix is not None else x
        if layer in parallel:
            change["write"] = "x" + "".join(f" + {factor}{title}" for title, factor in branches.items())
            change |= {title: {"write": None} for title in branches}
        if isinstance(lanes, Mapping) and layer == lanes["first"] - 1:  # this layer writes its result to every lane
            *_, last = branches
            owner = change if layer in parallel else change.setdefault(last, {})
            text = owner.get("write") or f"x + {branches[last].removeprefix(f'{last}.')}y"
            owner["write"] = {f"{title}_lane": text for title in branches}
        fields.append(change)
    for part in layers:
        factor = branches[_title(part)]
        if factor == f"{_title(part)}.residual * ":
            _merge(part, {"learn": {"residual": {"init": 1}}})
            part["write"] = "x + residual * y"
        elif factor:
            part["write"] = f"x + {factor}y"
    wiring = [fields.index(change) for change in fields]
    for first in dict.fromkeys(wiring):
        if fields[first]:
            where = condition_of([layer for layer in range(count) if wiring[layer] == first], count)
            changes.append({"where": where, **fields[first]})
    if isinstance(loop, Mapping):
        _order(blocks, loop, count)
        if skips is not None:
            read = _skipped("x", "output(2 * (runs // 2) - 1 - run)", gated, "")
            learn = _skip_values(gated, "")
            blocks["between"] = [{"name": "skips", "where": "run // (runs // 2) == 1", "learn": learn, "read": read}]
    if changes:
        blocks["changes"] = changes


def _migrate_train(train: Data) -> None:
    for optimizer in train.get("optimizers") or ():
        if isinstance(optimizer, MutableMapping):
            for key, schedule in (("momentum", _ramp), ("weight_decay", _taper)):
                if isinstance(value := optimizer.get(key), Mapping):
                    optimizer[key] = flow(schedule(value))
    forcing = train.get("teacher_forcing")
    if isinstance(forcing, list | tuple):
        train["teacher_forcing"] = flow({"at": _plain(forcing), "by": "step"})
    elif isinstance(forcing, Mapping) and "points" in forcing:
        new = {"at": _plain(forcing["points"]), "by": forcing.get("by", "step")}
        train["teacher_forcing"] = flow(new | ({"between": "linear"} if forcing.get("between") == "linear" else {}))
    if lengths := train.get("lengths"):
        points = _plain(lengths)
        context = {"at": points} if len(points) > 1 else points[0][1]
        if isinstance(train, CommentedMap):
            train.insert(list(train).index("lengths"), "context", flow(context))
            if (comment := train.ca.items.pop("lengths", None)) is not None:
                train.ca.items["context"] = comment
        train["context"] = flow(context)
    train.pop("lengths", None)


def _ramp(value: Mapping[str, Any]) -> dict[str, Any]:
    return {"at": [[0, value.get("start")], [value.get("steps"), value.get("end")]], "by": "step"}


def _taper(value: Mapping[str, Any]) -> dict[str, Any]:
    start, after = value.get("start"), value.get("after")
    return {"at": [[0, start], *([[after, start]] if after else []), [1, value.get("end")]]}


def _title(layer: Mapping[str, Any]) -> str:
    return str(layer.get("name") or layer.get("kind"))


def _migrate_gate(layer: Data) -> None:
    gate = layer.pop("gate", None)
    if isinstance(gate, Mapping):
        act = parse(gate.get("act", "2 * sigmoid(x)"))
        learned = {"of": "h", "shape": layer.get("heads"), "init": gate.get("init", 0)}
        layer["learn"] = {"head_gate": learned | {key: gate[key] for key in ("features",) if key in gate}}
        layer["y"] = str(Binary("*", Var("y"), substitute(act, {"x": Var("head_gate")})))


def _layer_lists(blocks: Data, layers: Sequence[Data], count: int, dim: Any) -> Iterator[dict[str, Any]]:
    """Removes the old keys `values` and `exclude` from the layers. If such a key listed only some layers, yields an
    entry for `blocks.changes` that applies to the listed layers."""
    for layer in layers:
        title = _title(layer)
        values, fields = layer.pop("values", None), dict[str, Any]()
        if isinstance(values, MutableMapping):
            size = layer.get("head_dim") or (dim or 0) // layer["heads"]
            common, fields = _value_embedding(title, values, layer.get("kv_heads", layer["heads"]) * size)
            blocks.setdefault("common", {}).update(common)
        exclude = layer.pop("exclude", None)
        listed = {} if exclude is None else {"exclude": {k: v for k, v in exclude.items() if k != "layers"}}
        for part, chosen in ((fields, (values or {}).get("layers")), (listed, (exclude or {}).get("layers"))):
            if chosen is not None and sorted(chosen) != list(range(count)):
                yield {"where": condition_of(sorted(chosen), count), title: part}
            else:
                _merge(layer, part)


def _value_embedding(title: str, values: Mapping[str, Any], shape: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Converts the old key `values` of the attention layer `title`, which added a learned embedding of each token to
    the layer's attention values. Returns two mappings: the learned values that compute the embedding, and the fields of
    the layer that add the embedding. `values` is the content of the old key, and `shape` is the total width of the
    attention values."""
    learned = {
        f"{title}_values.table": {
            "of": "ids", "shape": values.get("dim"), "init": values.get("init", {"normal": 0.01})
        },
        f"{title}_values.project": {"of": f"{title}_values.table", "shape": shape},
        f"{title}_values.scale": {"shape": 1, "init": values.get("scale", 0.1)},
    }  # fmt: skip
    return learned, {
        "learn": {"value_scale": {"shape": 1, "init": 1}},
        "v": f"v + value_scale * ({title}_values.scale * {title}_values.project)",
    }


def _merge(layer: Data, fields: Mapping[str, Any]) -> None:
    for key, value in fields.items():
        layer[key] = {**layer.get(key, {}), **value} if isinstance(value, dict) and key == "learn" else value


def _residual(layer: Data) -> str:
    factor = layer.pop("residual", None)
    if factor is None:
        return ""
    if factor == "learned":
        return f"{_title(layer)}.residual * "
    text = str(factor)
    whole = parse_wiring(f"x + {text} * y").expr == Binary("+", Var("x"), Binary("*", parse(text), Var("y")))
    return f"{text} * " if whole else f"({text}) * "


def _mixed(x: str) -> str:
    inner = x if x.isidentifier() else f"({x})"
    return f"mix.stream * {inner} + mix.embedded * x0"


def _skip_values(gated: bool, prefix: str) -> dict[str, Any]:
    return {f"{prefix}scale": {"init": 1}} | ({f"{prefix}share": {"init": 0}} if gated else {})


def _skipped(x: str, source: str, gated: bool, prefix: str) -> str:
    scaled = f"{prefix}scale * {source}"
    return f"{scaled} + sigmoid({prefix}share) * ({x} - {scaled})" if gated else f"{x} + {scaled}"


def _lane_fields(
    change: dict[str, Any],
    lanes: Mapping[str, Any],
    layer: int,
    count: int,
    branches: Mapping[str, str],
    mixes: bool,
    skip: Callable[[str], str] | None,
) -> dict[str, Any]:
    """Returns `change` with the fields of a block in which each layer has a separate residual stream (lane). `branches`
    maps the title of each layer to the factor of the layer's output."""
    titles = list(branches)
    names = [f"{title}_lane" for title in titles]
    learn = dict(change.get("learn", {}))
    for title in titles:
        learn[f"{title}.carry"] = {"shape": 1, "init": lanes.get("carry", 1.1)}
        learn |= {f"{other}.to_{title}": {"shape": 1, "init": 1} for other in titles}
    written = {}
    for name, title in zip(names, titles, strict=True):
        terms = [f"{title}.carry * {name}"]
        for other, factor in branches.items():
            branch = f"({factor}{other})" if factor else other
            terms.append(f"{other}.to_{title} * {branch}")
        written[name] = " + ".join(terms)
    change["learn"] = learn
    change["read"] = None
    if skip is not None:
        change["read"] = {names[0]: skip(names[0]), **{name: name for name in names[1:]}}
    for i, (title, name) in enumerate(zip(titles, names, strict=True)):
        change[title] = {"read": _mixed(name) if mixes and i == 0 else name, "write": None}
    total = " + ".join(written.values())
    change["write"] = f"{1 / len(titles)!r} * ({total})" if layer == count - 1 else written
    return change


def _order(blocks: Data, loop: Mapping[str, Any], count: int) -> None:
    first, last, passes = loop["first"], loop["last"], loop["passes"]
    share = loop.get("after", 0)
    parts = [_range(0, last), *[_range(first, last)] * (passes - 1)]
    order = " ".join([*parts, *([_range(last + 1, count - 1)] if last + 1 < count else [])])
    if share == 0:
        blocks["order"] = order
    elif share < 1:
        blocks["order"] = {"at": [[0, _range(0, count - 1)], [share, order]]}


def _range(first: int, last: int) -> str:
    return f"{first}..{last}" if last > first else str(first)


def condition_of(layers: Sequence[int], count: int) -> str:
    """Returns a condition that holds in exactly the given layers of a stack. `layers` are ascending, and the stack has
    `count` layers."""
    parts = []
    begin = 0
    for i, layer in enumerate(layers):
        if i + 1 == len(layers) or layers[i + 1] != layer + 1:
            first = layers[begin]
            if first == layer:
                parts.append(f"layer == {layer}")
            elif layer + 1 == count:
                parts.append(f"layer >= {first}")
            else:
                parts.append(f"{first} <= layer and layer <= {layer}" if first else f"layer <= {layer}")
            begin = i + 1
    return " or ".join(parts)
