"""Random specs that `specc validate` accepts.

A draw walks through the JSON Schema of specs. Switches, numbers, lists and sections of a new field are therefore drawn
without a change here; texts and sizes are drawn from spec_texts.py. What several fields decide together is not known
here: if the compiler refuses a spec, the field that the error points at is removed, and the spec is checked again.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spec_texts import BETWEEN, BLOCK_MASK, CHANGES, CHOICES, FRAGMENTS, INITS, LEFT_OUT, MASKS

from specc.compiler.build import plan_loaded
from specc.compiler.errors import SpecError
from specc.compiler.spec.check import load
from specc.compiler.spec.json_schema import schema_text

Data = dict[str, Any]
SCHEMA: Mapping[str, Any] = json.loads(schema_text())
SECTIONS: Mapping[str, Mapping[str, Any]] = {"Spec": SCHEMA, **SCHEMA["$defs"]}
SHARE = 0.15  # of optional fields that are set
# Of fields that are set more often, or less.
SHARES = {
    "Attention.rope": 0.6, "Attention.qk_norm": 0.4, "Attention.kv_heads": 0.4, "Attention.mask": 0.3,
    "Attention.exclude": 0.12, "Attention.pool": 0.0, "Attention.bos": 0.0, "Latent.bos": 0.0, "Attention.name":
    0.0, "Attention.of": 0.0, "Latent.q_rank": 0.4, "Decoder.norm": 0.3, "Decoder.cache": 0.3, "Decoder.head": 0.8,
    "Decoder.prefix": 0.0, "Decoder.init": 0.4, "DecoderBlocks.norm": 0.6, "DecoderBlocks.order": 0.3,
    "DecoderBlocks.changes": 0.4, "DecoderBlocks.between": 0.2, "LogitHead.softcap": 0.4, "LogitHead.tied": 0.6,
    "LogitHead.bias": 0.3, "Moe.router": 0.8, "Moe.shared_experts": 0.3, "Spec.fuse": 0.7, "Spec.merge": 0.5,
    "Spec.fold": 0.5, "Spec.quant": 1.0, "Spec.eval": 0.4, "QuantSpec.rules": 0.8, "QuantSpec.budget_bytes": 0.0,
    "TrainSpec.losses": 0.5, "TrainSpec.steps": 1.0, "TrainSpec.validate_tokens": 1.0, "TrainSpec.micro_batch": 1.0,
    "TrainSpec.budget_seconds": 0.0, "TrainSpec.precision": 0.3, "TrainSpec.recompute": 0.25, "BitsSpec.adapt": 0.6,
    "PrecisionSpec.fp8": 0.4, "EncoderDecoder.bridge": 1.0, "QatSpec.below": 1.0, "SwaSpec.below": 1.0,
    "SwaSpec.every": 1.0, "TrainSpec.qat": 0.2, "QuantSpec.promote": 0.2, "QuantSpec.allocate": 0.2,
    "QuantSpec.correct": 0.2, "BitsSpec.stride": 0.5, "BlocksStage.norm": 0.6, "Rms.places": 0.4, "Layer.places":
    0.4, "EncoderDecoder.dtype": 0.3, "QuantSpec.calibrate": 1.0,
}  # fmt: skip
# Fields that a method below fills in, as other sections decide what they may hold.
DECIDED = {
    "Spec.fuse", "DecoderBlocks.changes", "DecoderBlocks.order", "DecoderBlocks.between", "BlocksStage.changes",
    "TrainSpec.losses", "TrainSpec.recompute", "QuantSpec.rules",
}  # fmt: skip
# Fields that another field of the section needs, with the value that is set.
NEEDS: dict[str, Data] = {
    "Calibrate.length": {"source": "self"}, "Calibrate.temperature": {"source": "self"},
    "Calibrate.begin": {"source": "self"}, "TrainSpec.stop_at_loss": {"validate_every": 2},
    "Fp8Spec.history": {"scaling": "delayed"}, "PrecisionSpec.masters": {"compute": "bf16"},
    "PrecisionSpec.fp8": {"compute": "f32"},
    "TrainSpec.qat": {"schedule": {"warmdown_fraction": 1.0}}, "MuonSpec.cautious_decay": {"weight_decay": 0.1},
    "AdamWSpec.cautious_decay": {"weight_decay": 0.1}, "LionSpec.cautious_decay": {"weight_decay": 0.1},
    "SoapSpec.cautious_decay": {"weight_decay": 0.1}, "SignSpec.cautious_decay": {"weight_decay": 0.1},
    "AdditiveStage.width": {"form": "tanh"}, "Router.group_best": {"groups": 2}, "Router.top_groups": {"groups": 2},
    "Pool.tokens": {"by": "latent"}, "Pool.seed": {"by": "reservoir"}, "ExactMatchSpec.beam": {"decode": "beam"},
}  # fmt: skip
GPUS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120")
CHARS = "()*+-0123456789achijknostxyz"
REPAIRS = 40  # of one draw; what is refused after so many is drawn anew


class _Undrawable(Exception):
    """Raised for a text that has no choices."""


def places(data: Any, line: int = 1) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yields (line, path) of all values of `json.dumps(data, indent=1)`, and last the number of the next line."""
    yield line, ()
    if data and isinstance(data, dict | list):
        line += 1
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            for at, path in places(value, line):
                if path == ("end",):
                    line = at
                else:
                    yield at, (key, *path)
    yield line + 1, ("end",)


@dataclass
class RandomSpecs:
    """Draws specs. Equal seeds give equal specs.

    Attributes:
        rng: the random numbers.
        tokenizers: the vocabulary of each tokenizer, by its file name; `bytes` has 257 ids.
        refused: the first message of each spec that the compiler refused.
        text: the last spec that was tried.
        drawn: the fields that were set, as `Section.field`.
    """

    rng: random.Random
    tokenizers: Mapping[str, int] = field(default_factory=lambda: {"bytes": 257})
    refused: list[str] = field(default_factory=list)
    text: str = ""
    drawn: set[str] = field(default_factory=set)

    def valid(self, name: str) -> str:
        """Returns the text of a spec that the compiler accepts."""
        while True:
            data = self.spec(name)
            for _ in range(REPAIRS):
                self.text = text = json.dumps(data, indent=1)
                try:
                    plan_loaded(*load(text))
                except SpecError as error:
                    self.refused.append(f"{error.diagnostics[0].code} {error.diagnostics[0].message}")
                    if not self._repair(data, {each.mark.line for each in error.diagnostics}):
                        break
                else:
                    return text

    def _repair(self, data: Data, lines: set[int]) -> bool:
        """Removes what the lines of errors point at, and sometimes what surrounds it."""
        paths = {line: path for line, path in places(data) if path[-1:] != ("end",)}
        for path in sorted((paths[line] for line in lines if line in paths), key=len, reverse=True)[:1]:
            while len(path) > 1 and self.rng.random() < 0.3:
                path = path[:-1]
            holder = data
            for part in path[:-1]:
                holder = holder[part]
            if not path or (len(path) < 2 and path[0] in ("model", "train")):
                return False
            del holder[path[-1]]
            if not holder and isinstance(holder, list) and len(path) > 1:
                return self._without(data, path[:-1])
        return True

    def _without(self, data: Data, path: Sequence[Any]) -> bool:
        holder: Any = data
        for part in path[:-1]:
            holder = holder[part]
        del holder[path[-1]]
        return True

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def spec(self, name: str) -> Data:
        """Returns a spec that the compiler may refuse."""
        pairs = self.chance(0.2)
        model = self.pairs() if pairs else self.decoder()
        tokenizer = self.rng.choice([*self.tokenizers])
        if not pairs:
            model["vocab"] = self.tokenizers[tokenizer]
        data = self.section(
            "Spec",
            spec_version=2,
            name=name,
            targets=["cpu", self.rng.choice(GPUS)],
            model=model,
            train=self.train(model, tokenizer),
            eval=self.section("ExactMatchSpec", metric="exact_match") if pairs else self.section("BitsSpec"),
        )
        if "fuse" in data:
            data["fuse"] = self.fuse(model)
        quant = data.get("quant", {})
        if quant:
            quant["default"] = self.section(
                self.rng.choice(("Unquantized", "Unquantized", "Int8" if pairs else "Gptq"))
            )
        if "rules" in quant:
            quant["rules"] = self.rules()
        if "allocate" in quant or "count" not in quant.get("promote", {"count": 1}):
            quant["budget_bytes"] = self.rng.choice(CHOICES["budget_bytes"])
        return data

    # What several sections decide together.

    def decoder(self) -> Data:
        count = self.rng.choice((1, 2, 3, 4))
        layers = self.layers()
        blocks = self.blocks("DecoderBlocks", count, layers)
        if "order" in blocks:
            last = count - 1
            blocks["order"] = self.rng.choice(
                (f"0..{last} {last}", f"0..{last} 0..{last}", {"at": [[0, f"0..{last}"], [0.5, f"0..{last} {last}"]]})
            )
        if "between" in blocks:
            blocks["between"] = [dict(self.rng.choice(BETWEEN))]
        model = self.section("Decoder", vocab=257, dim=32, context=32, embed=self.embed(), blocks=blocks)
        attention = layers[0]
        if self.chance(0.08) and attention.get("mask", "j <= i") == "j <= i":
            model["prefix"], attention["mask"] = 3, "j <= i or j < prefix"
        return model

    def embed(self) -> list[Data]:
        token = self.section("Token")
        steps = [token]
        if "dim" in token:
            token["dim"] = self.rng.choice((16, 24))
            steps.append({"kind": "project"})
        kinds = ("Bigram", "Smear", "SmearByToken", "EmbedScale", "EmbedPositions", "EmbedNorm")
        return [*steps, *(self.section(kind) for kind in self.rng.sample(kinds, self.rng.choice((0, 0, 1, 2, 3))))]

    def layers(self) -> list[Data]:
        first = self.section("Attention" if self.chance(0.75) else "Latent")
        layers = [first, self.feed_forward("Mlp" if self.chance(0.7) else "Moe")]
        if self.chance(0.15):
            layers.append({**self.feed_forward("Mlp"), "name": "mlp2"})
        for layer in layers[:1]:
            if "pool" in layer or self.chance(0.06 * (layer["kind"] == "attention")):
                layer["pool"] = self.section("Pool", block=8, tokens=self.rng.choice((1, 2)))
                layer["mask"] = BLOCK_MASK
                layer.pop("score", None)
        return layers

    def feed_forward(self, section: str) -> Data:
        width = self.rng.choice(("hidden", "ratio"))
        layer = self.section(section, **{width: self.rng.choice(CHOICES[f"{section}.{width}"])})
        layer.pop("ratio" if width == "hidden" else "hidden", None)
        return layer

    def blocks(self, section: str, count: int, layers: list[Data]) -> Data:
        blocks = self.section(section, count=count, layers=layers)
        names = [layer.get("name", layer["kind"]) for layer in layers]
        if "changes" in blocks:
            blocks["changes"] = [self.change(names) for _ in range(self.rng.choice((1, 1, 2)))]
        if self.chance(0.12) and len(layers) == 2:
            for layer in layers:
                layer.pop("write", None)
            blocks["write"] = f"x + {names[0]} + {names[1]}"
        return blocks

    def change(self, names: Sequence[str]) -> Data:
        text = json.dumps(self.rng.choice(CHANGES))
        return json.loads(text.replace("<first>", names[0]).replace("<last>", names[-1]))

    def lines(self) -> Data:
        if self.chance(0.5):
            return self.section("LinesData", kind="lines")
        return self.section("PolynomialData", kind="polynomial", lines=200)

    def train(self, model: Data, tokenizer: str) -> Data:
        text = model["kind"] == "decoder"
        layers = model["blocks"]["layers"] if text else []
        train = self.section(
            "TrainSpec",
            data=self.section("TextData", tokenizer=tokenizer) if text else self.lines(),
            steps=self.rng.choice((2, 3, 4)),
            validate_tokens=256,
            optimizers=self.optimizers(layers),
            micro_batch=self.rng.choice((2, 4)),
        )
        for key in ("batch", "tokens_per_step", "context", *["teacher_forcing"] * text):
            train.pop(key, None)
        size = "tokens_per_step" if text and self.chance(0.7) else "batch"
        unit = 32 if size == "tokens_per_step" else 1
        train[size] = 4 * unit
        if text and self.chance(0.15):
            train[size] = {"at": [[0, 4 * unit], [0.5, 8 * unit]]}
        if text and self.chance(0.15):
            train["context"] = self.rng.choice((16, {"at": [[0, 16], [0.5, 32]]}))
        if "losses" in train:
            train["losses"] = self.losses(model)
        if "recompute" in train:
            parts = ["block", *(layer.get("name", layer["kind"]) for layer in layers)]
            train["recompute"] = [self.rng.choice(parts)]
        return train

    def losses(self, model: Data) -> list[Data]:
        kinds = ["LaterToken", "ZLoss", *["ModuleAhead", "AuxiliaryLoss"] * (model["kind"] == "decoder")]
        losses = [self.section("NextToken")]
        for kind in self.rng.sample(kinds, self.rng.choice((1, 1, 2))):
            weight = self.rng.choice(CHOICES["weight_of_loss"])
            extra: Data = {}
            if kind == "AuxiliaryLoss":
                names = {layer.get("name", layer["kind"]): layer["kind"] for layer in model["blocks"]["layers"]}
                last, kind_of_last = [*names.items()][-1]
                stated = ("balance", "z", "sequence_balance") if kind_of_last == "moe" else ("activation",)
                extra["name"] = f"{last}.{self.rng.choice(stated)}"
            losses.append(self.section(kind, weight=weight, **extra))
        return losses

    def optimizers(self, layers: Sequence[Data]) -> list[Data]:
        kind = self.rng.choice(("MuonSpec", "SoapSpec", "LionSpec", "AdamWSpec", None, None))
        routed = any((layer.get("router") or {}).get("bias") for layer in layers)
        some: list[Data] = [self.section("SignSpec", match="*.router_bias")] if routed and self.chance(0.8) else []
        if kind is not None:
            some.append(self.section(kind, match=self.rng.choice(("*.{q,k,v,out,up,gate,down}", "*.up", "*.down"))))
        return [*some, self.section(self.rng.choice(("AdamWSpec", "AdamWSpec", "LionSpec")), match="*")]

    def rules(self) -> list[Data]:
        patterns = self.rng.sample(("*.{q,k,v,out}", "*.{up,gate,down}", "embed.token", "*.lstm.*"), 2)
        kinds = ("GptqRule", "RoundRule", "Int8Rule", "UnquantizedRule")
        return [self.section(self.rng.choice(kinds), match=match) for match in patterns]

    def fuse(self, model: Data) -> list[Data]:
        points: list[Data] = []
        if model["kind"] == "decoder":
            stacks, parts = ["blocks"], model["blocks"]["layers"]
        else:
            stacks = [f"{side}.{s['kind']}" for side in ("encoder", "decoder") for s in model[side] if "layers" in s]
            parts = [layer for side in ("encoder", "decoder") for s in model[side] for layer in s.get("layers", ())]
        if head := (model["kind"] == "decoder" and self.chance(0.7)):
            chosen = model.get("head", {})
            nodes = ["logits", *["biased"] * bool(chosen.get("bias")), *["softcap"] * ("softcap" in chosen), "loss"]
            points.append({"head": nodes} | ({"chunks": 2} if self.chance(0.2) else {}))
        for stack in stacks:
            for layer in {layer.get("name", layer["kind"]): layer for layer in parts}.values():
                part = f"{stack}.*.{layer.get('name', layer['kind'])}"
                if layer["kind"] == "mlp":
                    points.append({part: self.rng.choice((["up", "act", "down"], ["up", "act"]))})
                    if "dropout" in layer and self.chance(0.5):
                        points[-1] = {part: ["up", "act", "down", "dropped", "x"]}
                elif layer["kind"] in ("attention", "latent") and self.chance(0.6):
                    points.append({part: ["y"]})
                elif layer["kind"] == "attention":
                    normed = "qk_norm" in layer
                    first = ["q.norm"] * normed + ["q.rope"] * ("rope" in layer)
                    first += ["q.gain"] * ("gain" in (layer.get("qk_norm") or {}))
                    points += [{part: first}] * bool(first)
        return points if points or not head else [{"head": ["logits", "loss"]}]

    def pairs(self) -> Data:
        width, recurrent = self.rng.choice((16, 32)), self.chance(0.5)
        encoder: list[Data] = [self.section("EmbedStage", dim=width)]
        decoder: list[Data] = [self.section("EmbedStage", dim=width)]
        if recurrent:
            both = self.chance(0.5)
            hidden = width // 2 if both else width
            directions = {"directions": "both" if both else "forward"}
            encoder.append(self.section("LstmStage", hidden=hidden, **directions))
            if self.chance(0.2):
                decoder = [{"kind": "repeat"}]
            decoder.append(self.section("LstmStage", hidden=width, directions="forward"))
            if self.chance(0.5):
                decoder.append(self.section("AdditiveStage", query="lstm"))
                if self.chance(0.5) and decoder[0]["kind"] == "embed":
                    decoder += [
                        {"kind": "concat", "beside": "embed"},
                        self.section("LstmStage", hidden=width, name="last"),
                    ]
        else:
            for side in (encoder, decoder):
                layers = self.layers()
                for layer in layers:
                    for key in ("learn", "y", "v", "write", "read", "pool", "mask", "bos"):
                        layer.pop(key, None)
                if side is decoder:
                    cross = self.section("Attention", heads=2, of="encoder", name="cross")
                    for key in ("learn", "y", "v", "write", "rope", "pool", "mask", "bos", "score", "exclude"):
                        cross.pop(key, None)
                    layers.insert(1, cross)
                    layers[0].update({"mask": self.rng.choice(MASKS)} if self.chance(0.3) else {})
                side.append(self.blocks("BlocksStage", self.rng.choice((1, 2)), layers))
        for side in (encoder, decoder):
            if self.chance(0.2):
                side.append(self.section("DropoutStage"))
            if self.chance(0.2):
                side.append({"kind": "mlp", "hidden": 24, "act": "relu(x) ** 2", "write": "x + y"})
            if side is decoder and self.chance(0.2):
                side.append({"kind": "attention", "of": "encoder", "heads": 2, "name": "late", "read": "x"})
        model = self.section(
            "EncoderDecoder",
            vocab={"chars": CHARS},
            context=30,
            encoder=encoder,
            decoder=decoder,
        )
        if not recurrent or self.chance(0.2):
            model.pop("bridge", None)
        return model

    # What the schema says.

    def section(self, name: str, /, **given: Any) -> Data:
        """Returns a section with some of its optional fields. `given` are fields that are decided already.

        A field that is `given` and optional is set with its share.
        """
        schema = SECTIONS[name]
        result: Data = {}
        required = schema.get("required", ())
        for key, part in schema["properties"].items():
            place = f"{name}.{key}"
            if key not in required and not self.chance(SHARES.get(place, SHARE) if key not in given else 1.0):
                continue
            if key in given:
                result[key] = given[key]
                continue
            if place in LEFT_OUT:
                continue
            if place in DECIDED:
                result[key] = None
                continue
            try:
                result[key] = self.field(name, key, part)
            except _Undrawable:
                if key in required:
                    raise
        for key in [*result]:
            result |= {other: value for other, value in NEEDS.get(f"{name}.{key}", {}).items() if other not in given}
        for share, alternatives in FRAGMENTS.get(name, ()):
            if self.chance(share):
                fragment = json.loads(json.dumps(self.rng.choice(alternatives)))
                learn = {**result.get("learn", {}), **fragment.pop("learn", {})}
                result |= {key: value for key, value in fragment.items() if key not in given}
                result |= {"learn": learn} if learn else {}
        self.drawn |= {f"{name}.{key}" for key in result}
        return result

    def field(self, section: str, key: str, schema: Mapping[str, Any]) -> Any:
        """Returns a value of a field: a choice of spec_texts.py, or what the schema allows."""
        choices = CHOICES.get(f"{section}.{key}", CHOICES.get(key))
        inner = self._sections(schema)
        if choices is None or (inner and self.chance(0.3)):
            return self.value(section, schema)
        if not choices:
            raise _Undrawable
        return json.loads(json.dumps(self.rng.choice(choices)))

    def _sections(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Returns the sections of a union."""
        parts = schema.get("anyOf", schema.get("oneOf", ()))
        inner = [section for part in parts for section in self._sections(part)]
        return [*inner, *(part for part in parts if "$ref" in part and "Init" not in part["$ref"])]

    def value(self, section: str, schema: Mapping[str, Any]) -> Any:
        """Returns a value that a part of the schema allows, small where numbers have no choices."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name == "Init":
                return dict(self.rng.choice(INITS))
            return self.schedule(name) if name.endswith("Schedule") else self.section(name)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.rng.choice(schema["enum"])
        for union in ("anyOf", "oneOf"):
            if union in schema:
                parts = [part for part in schema[union] if part.get("type") != "null"]
                return self.value(section, self.rng.choice(self._sections(schema) or parts))
        kinds: Mapping[str, Callable[[], Any]] = {
            "boolean": lambda: self.chance(0.6),
            "integer": lambda: self._integer(schema),
            "number": lambda: self._number(schema),
            "array": lambda: self._array(section, schema),
            "null": lambda: None,
        }
        if schema.get("type") not in kinds:
            raise _Undrawable
        return kinds[schema["type"]]()

    def _integer(self, schema: Mapping[str, Any]) -> int:
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
        return self.rng.randint(low, min(low + 3, schema.get("maximum", low + 3)))

    def _number(self, schema: Mapping[str, Any]) -> float:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1))
        high = min(low + 1, schema.get("maximum", schema.get("exclusiveMaximum", low + 1)))
        return round(self.rng.uniform(low, high), 3) or high / 2

    def _array(self, section: str, schema: Mapping[str, Any]) -> list[Any]:
        first, least = schema.get("prefixItems", ()), schema.get("minItems", 0)
        count = len(first) or self.rng.randint(max(1, least), max(1, least) + 1)
        items = [self.value(section, first[i] if first else schema["items"]) for i in range(count)]
        if all(isinstance(item, str) for item in items):
            return list(dict.fromkeys(items))
        return items

    def schedule(self, name: str) -> Data:
        """Returns a value that changes: both times are valid in every unit."""
        values: Mapping[str, Sequence[Any]] = {
            "RateSchedule": (0.01, 0.001), "UnitSchedule": (0.9, 0.5), "WeightSchedule": (0.3, 0.0),
            "ForcingSchedule": (1.0, 0.3), "CapSchedule": (30, 15.0), "MaskSchedule": MASKS[:3],
        }  # fmt: skip
        if name not in values:
            raise _Undrawable
        properties = SECTIONS[name]["properties"]
        units = properties["by"].get("enum", ["share"])
        unit = self.rng.choice(units)
        self.drawn |= {f"{name}.{key}" for key in properties}
        at = [[time, self.rng.choice(values[name])] for time in (0, 0.5 if unit == "share" else 1)]
        between = properties["between"].get("enum", [properties["between"].get("const")])
        return {"at": at, "by": unit, "between": self.rng.choice(between)}
