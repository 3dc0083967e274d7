"""Values of fields of random specs that a JSON Schema alone cannot draw well: expressions, names, small sizes."""

from typing import Any

ACTS = (
    "relu(x) ** 2", "gelu(x)", "gelu_tanh(x)", "silu(gate) * x", "leaky_relu(x, 0.5) ** 2", "x * sigmoid(1.702 * x)",
    "gelu_tanh(gate) * x", "where(x > 0, x, 0.1 * x)", "min(max(x, 0), 6)", "tanh(x) * x", "exp(-x * x)",
    "min(silu(gate), 7) * (min(max(x, -7), 7) + 1)", "sqrt(x * x + 1) - 1", "abs(x) ** 1.5", "log(1 + exp(x))", "x",
    "erf(x) * gate", "x + gate",
)  # fmt: skip
MASKS = (
    "j <= i and i - j < 7", "j <= i and (i - j < 6 or j < 3)", "j <= i and i // 8 - j // 8 < 2", "j < i or j == i",
    "j <= i and (i - j) % 3 == 0", "j <= i and (h > 0 or i - j < 4)", "j <= i", "j <= i and i - j < 4 * (h + 1)",
)  # fmt: skip
BLOCK_MASK = "j <= i and i // 8 - j // 8 < 2"
SCALES = ("1/sqrt(24)", 0.2, "1/sqrt(head_dim) / (layer + 1)", "0.5 / sqrt(head_dim)")
INITS: tuple[dict[str, Any], ...] = (
    {"normal": 0.02}, {"normal": "1/sqrt(fan_in)"}, {"normal": "0.5/sqrt(2 * layers)"}, {"orthogonal": 0.9},
    {"uniform": "sqrt(3 / fan_in)"}, {"uniform": 0.05}, {"constant": 0.01},
)  # fmt: skip
WEIGHTS = ("w", "1 + w", "none", "exp(w)", "2 * w")
NUMBERS = ("0.003 * (1 - t)", "0.002 * sqrt(1 - t / 2)")
CAPS = (30, 15.0, "15 * tanh(z / 15)", "z / 8", "30 * sigmoid(z / 7.5)", "z * 0.5", "min(max(z, -9), 9)")

# Values of fields, by `Section.field` or `field`. A list is a choice of values.
CHOICES: dict[str, tuple[Any, ...]] = {
    "act": (*ACTS, {"expr": "leaky_relu(x, 0.25)", "name": "leaky"}),
    "NamedActivation.expr": ACTS,
    "NamedActivation.name": ("some",),
    "mask": MASKS,
    "scale": SCALES,
    "Moe.router_input": ("x0", "x0 + h", "2 * h"),
    "Pool.mask": ("j + block <= i", "j + 2 * block <= i", "j + block <= i and j < 24"),
    "Pool.block": (4, 8),
    "Pool.tokens": (1, 2),
    "Router.scale": (2.5, 0.5),
    "Bigram.scale": (0.05, 1.0),
    "EmbedScale.by": ("sqrt(dim)", 2.0),
    "LoraSettings.scale": (2.0,),
    "LoraSettings.rank": (2, 40),
    "Fp8Spec.scale": ("tensor", "row"),
    "Fp8Spec.match": ("blocks.*.mlp.*", "head.logits", "*"),
    "Fp8Spec.history": (2,),
    "Layer.scale": ("1/sqrt(layer + 1)", 0.5, "1 - 0.5 * layer / layers"),
    "Rms.scale": ("1/sqrt(layer + 1)", 0.5, "1 - 0.5 * layer / layers"),
    "weight": WEIGHTS,
    "dropout": (0.1, 0.5),
    "p": (0.1, 0.5),
    "heads": (2, 4),
    "kv_heads": (1, 2),
    "head_dim": (8, 16),
    "kv_rank": (8, 16),
    "q_rank": (8, 12),
    "rope_dim": (4, 8),
    "v_dim": (8, 12),
    "Mlp.hidden": (24, 40, 64),
    "Moe.hidden": (16, 24),
    "LstmStage.hidden": (8, 16),
    "experts": (2, 4, 8),
    "top_k": (1, 2, 3),
    "shared_experts": (1, 2),
    "Mlp.ratio": (2, 3.5, 4),
    "Moe.ratio": (0.5, 1),
    "groups": (2,),
    "top_groups": (1,),
    "group_best": (1, 2),
    "dims": (4, 8),
    "base": (10000, 500),
    "trained": (8, 16),
    "RopeSpec.scaling": ("f / 8", "where(pair < 2, f, 0)", "f * (pair + 1)"),
    "factor": (1, 4),
    "low": (0.5,),
    "high": (2, 4),
    "magnitude": (1, "0.1 * log(factor) + 1", "sqrt(factor)"),
    "gain": (1.5,),
    "eps": (1e-6, 1e-5, 1e-3),
    "buckets": (64, 100),
    "Bigram.dim": (8,),
    "features": (4, 12),
    "bos": (256,),
    "TextData.bos": (),
    "shape": ("linear", "cosine", "(1 - t) ** 2"),
    "page": (1, 4, 16),
    "init": INITS,
    "output_init": INITS,
    "softcap": CAPS,
    "lr": (0.002, 0.01, *NUMBERS),
    "weight_decay": (0.1, 0.0, "0.1 * (1 - t)"),
    "SgdSettings.weight_decay": (0.01,),
    "AdamWSettings.weight_decay": (0.01,),
    "Slot.weight_decay": (0.01,),
    "SlotCausal.weight_decay": (0.01,),
    "momentum": (0.9, "0.9 + 0.05 * t"),
    "SgdSettings.momentum": (0.0, 0.9),
    "SgdSettings.lr": (0.001,),
    "AdamWSettings.lr": (0.001,),
    "Slot.lr": (0.003,),
    "SlotCausal.lr": (0.003,),
    "betas": ((0.9, 0.95), (0.5, 0.99)),
    "coefficients": (((4.0848, -6.8946, 2.927), (3.9505, -6.3029, 2.6377)),),
    "MuonSpec.steps": (2, 5),
    "every": (1, 2),
    "basis_every": (1, 2),
    "largest_side": (16, 10000),
    "second_moment": (0.9,),
    "growth": (2.0,),
    "initial": (1024.0, 65536.0),
    "least": (1.0,),
    "loss_scale": (128.0,),
    "decay": (0.5, 0.9),
    "below": (0.6, 1.0),
    "weight_of_loss": (0.1, "0.3 * (1 - t)"),
    "ahead": (2, 3),
    "modules": (1, 2),
    "bits": (4, 5, 8),
    "Allocate.bits": ((4, 6), (2, 3, 8)),
    "clip_stds": ((), (3.0, 12.0)),
    "clip_quantiles": ((0.99, 1.0), (1.0,)),
    "clip_floor": (0.0, 1.0),
    "clip": (0.99, 1.0),
    "block": (8, 128),
    "damping": (0.01, 1.0),
    "correction_rank": (1, 4),
    "Int8.correction_rank": (),
    "Int8Rule.correction_rank": (),
    "rank": (1, 4),
    "count": (1, 2, 3),
    "Promote.match": ("*", "blocks.*"),
    "Promote.bits": (8,),
    "Allocate.match": ("*", "blocks.*"),
    "Correct.match": ("*", "blocks.*"),
    "TestTimeTraining.match": ("*", "blocks.*"),
    "TestTimeTraining.chunk": (32, 64),
    "TestTimeTraining.epochs": (1, 2),
    "TestTimeTraining.batch": (2,),
    "sequences": (2, 4),
    "batch": (2, 4),
    "length": (8, 32),
    "temperature": (0.8, 1.5),
    "BitsSpec.window": (16, 32),
    "BitsSpec.stride": (8, 16),
    "ExactMatchSpec.batch": (16,),
    "ExactMatchSpec.lines": (20,),
    "LinesData.separator": ("=", " -> "),
    "LinesData.validation_fraction": (0.2, 0.5),
    "ExactMatchSpec.beam": (2, 3),
    "windows": (1, 4),
    "clip_norm": (0.3, 1.0),
    "seed": (0, 7),
    "budget_bytes": (60_000, 200_000),
    "teacher_forcing": (0.0, 0.5, 1.0),
    "stop_at_loss": (0.01,),
    "validate_every": (2,),
    "checkpoint_every": (2,),
    "warmup_steps": (1,),
    "warmdown_steps": (2,),
    "warmup_fraction": (0.3,),
    "warmdown_fraction": (0.5,),
    "floor": (0.1,),
    "merge": ("auto", ("blocks.*.attention",), ("*",)),
    "fold": ("auto", ("*",), ("blocks.*",)),
    "prefix": (3,),
    "width": (4,),
}

# Alternatives of several fields at once, mostly an expression and the learned values that it reads. Of each group, a
# section has one alternative or none.
Group = tuple[float, tuple[dict[str, Any], ...]]
NUMBER: dict[str, Any] = {"init": 1}
PER_HEAD: dict[str, Any] = {"of": "h", "features": 12, "shape": "heads"}
SCORED: Group = (
    0.3,
    (
        {"score": "s - slope(h) * (i - j)"},
        {"score": "20 * tanh(s / 20)"},
        {"score": "s - log(i - j + 1)"},
        {"score": "s + bias[h, bucket(i - j, 8, 16)]", "learn": {"bias": {"shape": ["heads", 8], "init": 0}}},
        {"score": "s + bias[h, min(i - j, 9)]", "learn": {"bias": {"shape": ["heads", 10], "init": 0.1}}},
        {"score": "s + 0 * i"},
    ),
)
OUTPUT: Group = (
    0.25,
    (
        {"y": "y * 2 * sigmoid(open)", "learn": {"open": PER_HEAD}},
        {"y": "y * sigmoid(open)", "learn": {"open": {"of": "h", "shape": 1}}},
        {"y": "y * gate", "learn": {"gate": {"init": 1, "shape": 1}}},
    ),
)
RESIDUAL: Group = (
    0.4,
    (
        {"write": "x + residual * y", "learn": {"residual": NUMBER}},
        {"write": "x + y / sqrt(2 * layers)"},
        {"write": "x + 0.5 * y"},
        {"write": "mix * x + (1 - mix) * y", "learn": {"mix": {"init": 0.5, "shape": 1}}},
        {"write": "x + y * share", "learn": {"share": {"of": "h", "shape": 1}}},
    ),
)
DOCUMENTS: Group = (0.15, ({"mask": "j <= i and document(i) == document(j)", "bos": 256},))
FRAGMENTS: dict[str, tuple[Group, ...]] = {
    "Attention": (
        SCORED,
        OUTPUT,
        DOCUMENTS,
        RESIDUAL,
        (
            0.2,
            (
                {"v": "v + table", "learn": {"table": {"of": "ids", "shape": "values"}}},
                {"v": "share * v + (1 - share) * first", "learn": {"share": {"init": 0.5, "shape": 1},
                                                                  "first": {"of": "x0", "shape": "values"}}},
                {"v": "min(max(v, -4), 4)"},
                {"v": "table", "learn": {"table": {"of": "x0", "shape": "values"}}},
            ),
        ),
        (
            0.15,
            (
                {"q": "min(max(q, -8), 8)", "k": "min(max(k, -8), 8)"},
                {"q": "q * scale", "learn": {"scale": {"shape": "heads * head_dim", "init": 1}}},
                {"k": "2 * k"},
            ),
        ),
        (0.08, ({"mask": BLOCK_MASK, "pool": None},)),
    ),
    "Latent": (SCORED, OUTPUT, DOCUMENTS, RESIDUAL),
    "Mlp": (RESIDUAL,),
    "Moe": (RESIDUAL,),
    "DecoderBlocks": (
        (
            0.3,
            (
                {"read": "stream * x + embedded * x0", "learn": {"stream": NUMBER, "embedded": {"init": 0.1}}},
                {"read": "x + 0.1 * x0"},
                {"read": "x + sigmoid(open) * x0", "learn": {"open": {"of": "x", "features": 4, "shape": 1}}},
            ),
        ),
        (0.1, ({"common": {"shared": {"of": "x0", "shape": 1}}, "read": "x + shared * x0"},)),
    ),
    "BlocksStage": (),
}  # fmt: skip

# Changes of blocks. A name in angle brackets is that of the first or the last layer.
CHANGES: tuple[dict[str, Any], ...] = (
    {"where": "layer == layers - 1", "learn": {"skip": NUMBER}, "read": "x + skip * output(0)"},
    {"where": "layer == 0", "norm": {"kind": "layer"}},
    {"where": "layer % 2 == 1", "<first>": {"mask": "j <= i and i - j < 5", "bos": None}},
    {"where": "layer > 0", "<first>": {"rope": None}},
    {"where": "layer > 0", "<first>": {"v": "share * v + (1 - share) * value(0)",
                                       "learn": {"share": {"init": 0.5, "shape": 1}}}},
    {"where": "layer > 0", "<first>": {"v": "value(0)"}},
    {"where": "layer == layers - 1", "<first>": None},
    {"where": "layer < 1", "<last>": {"kind": "mlp", "ratio": 2, "act": "relu(x) ** 2"}},
    {"where": "layer >= 1", "<last>": {"dropout": 0.25}},
    {"where": "layer == layers - 1", "write": "x + <first> + 0.5 * <last>"},
)  # fmt: skip
BETWEEN: tuple[dict[str, Any], ...] = (
    {"name": "skips", "where": "run == runs - 1", "learn": {"scale": NUMBER}, "read": "x + scale * output(0)"},
    {"name": "skips", "where": "run > runs // 2", "learn": {"scale": NUMBER, "share": {"init": 0}},
     "read": "scale * output(runs - 1 - run) + sigmoid(share) * (x - scale * output(runs - 1 - run))"},
    {"name": "halves", "where": "run > 0 and layer > 0", "read": "0.5 * x + 0.5 * x0"},
)  # fmt: skip

# Fields that no random spec has: each needs a file, or one is drawn elsewhere.
LEFT_OUT = {
    "TrainSpec.budget_seconds": "a length in steps makes a run repeatable",
    "TrainSpec.start": "weights of another run",
    "TextData.pattern": "a file of ranks",
    "TextData.special": "a file of ranks",
    "TextData.bos": "a tokenizer with special tokens",
    "StartSpec": "weights of another run",
    "SpecialToken": "a file of ranks",
}
