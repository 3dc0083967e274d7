"""Transforms of sections undo exactly, the one that is chosen is the smallest, and files of version 1 still load."""

import base64
import random
from itertools import product
from pathlib import Path

import brotli
import numpy as np
import pytest
from export_samples import CODE, INTERFACE, Layout, assert_same, layout_of, random_arrays, spec_of

from specc.compiler.quant import artifact_sections
from specc.compiler.quant.artifact_sections import Kind, Stream, overhead_bytes
from specc.compiler.quant.scheme import Stored
from specc.runtime.artifact import codecs
from specc.runtime.artifact.artifact import ArtifactContents, measured_bytes, read_artifact, write_artifact
from specc.runtime.artifact.codecs import Codec, compress, decompressed
from specc.runtime.artifact.streams import Transform, choose, pack, raw_size, unpack
from specc.runtime.errors import EnvironmentFailure, IntegrityError
from specc.runtime.storage.data_digests import DataDigests

# Written by specc 0.1.0 before version 2: `LAYOUT_1` filled by `random_arrays(LAYOUT_1, 7)`.
LAYOUT_1: Layout = [
    ("blocks.0.up", Stored("codes", "i8", (5, 7))),
    ("blocks.0.up", Stored("scale", "f16", (5,))),
    ("blocks.1.up", Stored("codes", "i8", (5, 7))),
    ("blocks.1.up", Stored("scale", "f16", (5,))),
    ("norm", Stored("value", "bf16", (3,))),
    ("gain", Stored("value", "f32", ())),
    ("bias", Stored("codes", "i32", (4,))),
]
VERSION_1 = """
lT%PdLqiP;0RR911^@s6$ClH4ZAl)F3~rl)?$b;a!1H(c@bk;FA#c0)cG_blR+P|+E>r)?;KL9;TGsXlYQ2^YvG}EBcLWQ;0*`Pj00000a{vGU
1pxp6gI8sI$`1@^KgyMYk!EI0dA`rN&`*z3R*oaZbKn9r0RR91IsgCwMgRZ+=l@~0@-
&yG=nC)2L7bqLJp#m`@lxv>5W)y_tqnP#0ssI27ytkO6aWAKzE~pc-unzd9^11rkd74red}x2BNoP%pjx^Z1rSDM1ONa43IG5A1^@s6v)?Cjd3
Y!h>EH_oxC!VGySQip9|%mZsQ+gpmjc801poj52mk;81ONa4VZQelA#%Fyo5CD-`nXTh<UR^(A93wlf-
>>B9l_PZ1^@s66aWAK5C8xG0F~Okt7ZzT4uYT%OlM~%IZm`cG;(YNwCU33iI$5fIh!BTOQlEEpxI4Tk?{9vatH@nVDY6dOsu3apryGz9|Qpa#L
_usKc`zBD+>f_*}B`#XT88l|6jfZEh`JN7EsNbXPDkFp&UM0gYx0x^+rT-
43f_+lz0y?0xa&#W1w^FGV;?@j#zyUv`%}z#|_O$(0$vlwWDW9ktz&Y-
k0N6J8R76JjU`~#1O+t)AR=)MF0R~J=TA&bfVk(sY0dz$R%QxIC@C~bx4G4Xpe-
wtX5?vHSOF|Ul7<y`7`hnf#k-y{l(kNM2`u8nb$P>*LstMbE2|LCrC1gO;T6p1CIiL@Gl=exFQ3O0f3Ulj{O6V2Y^u?AB~0g6NvC<Dj{)tft3R
"""


def test_every_transform_comes_back() -> None:
    rng = np.random.default_rng(0)
    for kind, rows, columns, bits in product((Kind.CODES, Kind.SCALES, Kind.F32), (1, 2, 7), (1, 3, 8), range(8)):
        stream = Stream(kind, columns, rows, ())
        if bits & Transform.ORDERED and kind != Kind.CODES:
            with pytest.raises(IntegrityError, match="cannot have the transform ORDERED"):
                raw_size(stream, rows, bits)
            continue
        data = rng.integers(0, 256, rows * stream.row_bytes, np.uint8).tobytes()
        raw = pack(data, stream, bits)
        assert len(raw) == raw_size(stream, rows, bits)
        assert unpack(raw, stream, rows, bits, "it") == data


def test_what_the_transforms_do() -> None:
    codes = np.array([[9, -9, 9], [1, 2, 3]], np.int8).tobytes()
    stream = Stream(Kind.CODES, 3, 2, ())
    assert pack(codes, stream, Transform.TRANSPOSED) == bytes([9, 1, 247, 2, 9, 3])
    assert pack(codes, stream, Transform.SHUFFLED) == bytes([9, 9, 2, 247, 1, 3])
    assert pack(codes, stream, Transform.ORDERED) == bytes([1, 0, 0, 0]) + bytes([1, 2, 3, 9, 247, 9])
    halves = Stream(Kind.SCALES, 2, 2, ())
    assert pack(b"aAbBcCdD", halves, Transform.SHUFFLED) == b"abcdABCD"
    assert pack(b"aAbBcCdD", halves, Transform.TRANSPOSED | Transform.SHUFFLED) == b"acbdACBD"


def test_roles_share_streams_and_cuts_fall_between_rows() -> None:
    layout: Layout = []
    for block in range(11):
        layout += [
            (f"blocks.{block}.mlp.up", Stored("codes", "i8", (1792, 512))),
            (f"blocks.{block}.mlp.up", Stored("scale", "f16", (1792,))),
            (f"blocks.{block}.q", Stored("codes", "i8", (4, 8))),
        ]
    layout += [("empty", Stored("codes", "i8", (0, 5))), ("one.2", Stored("codes", "i8", (3, 5)))]
    result = artifact_sections.streams(layout)
    assert [(s.kind, s.columns, s.rows, len(s.members)) for s in result] == [
        (Kind.CODES, 512, 11 * 1792, 11),
        (Kind.CODES, 1, 11 * 32 + 15, 12),
        (Kind.SCALES, 1, 11 * 1792, 11),
    ]
    for stream in result:
        cuts = list(stream.cuts())
        assert sum(cuts) == stream.rows and min(cuts) > 0
        assert max(cuts) * stream.row_bytes <= artifact_sections.CHUNK_BYTES and max(cuts) - min(cuts) <= 1
    assert sum(s.rows * s.row_bytes for s in result) == sum(stored.bytes for _, stored in layout)


def structured(rng: np.random.Generator, rows: int, columns: int, by: str) -> bytes:
    """Codes whose size depends on the column, or on the row, as those of trained matrices do."""
    sizes = np.exp(1.2 * rng.standard_normal((1, columns) if by == "columns" else (rows, 1)))
    return np.clip(np.rint(3 * sizes * rng.standard_normal((rows, columns))), -31, 31).astype(np.int8).tobytes()


@pytest.mark.parametrize("by", ["columns", "rows", "nothing"])
def test_the_choice_on_a_part_is_the_smallest_of_the_whole(by: str) -> None:
    """Ranked by full quality on the whole section, the chosen transform is within 0.2 % of the best."""
    stream = Stream(Kind.CODES, 320, 500, ())
    data = (
        structured(np.random.default_rng(1), 500, 320, by) if by != "nothing" else random.Random(0).randbytes(500 * 320)
    )
    options = (0, 1, 2, 4, 5)
    full = {o: len(brotli.compress(pack(data, stream, o), quality=11, lgwin=24)) for o in options}
    chosen = choose(data, stream, 11, Codec.BROTLI)
    assert full[chosen] <= 1.002 * min(full.values())
    if by == "columns":
        assert chosen & Transform.TRANSPOSED and full[chosen] < 0.97 * full[0]


def test_transforms_and_roles_make_a_file_smaller(tmp_path: Path) -> None:
    """Against the plain scheme: one byte a value, one brotli stream, no transform."""
    rng = np.random.default_rng(2)
    layout: Layout = []
    tensors = {}
    for block in range(2):
        for role, rows, columns in (("up", 256, 128), ("down", 128, 256)):
            name = f"blocks.{block}.{role}"
            layout += [(name, Stored("codes", "i8", (rows, columns))), (name, Stored("scale", "f16", (rows,)))]
            codes = np.frombuffer(structured(rng, rows, columns, "columns"), np.int8).reshape(rows, columns)
            tensors[name] = {"codes": codes, "scale": rng.uniform(0.01, 0.02, rows).astype(np.float16)}
    plain = brotli.compress(b"".join(tensors[n][s.suffix].tobytes() for n, s in layout), quality=11, lgwin=24)
    spec = spec_of(layout)
    reported = write_artifact(
        tmp_path / "m", ArtifactContents(spec=spec, interface=INTERFACE, code=CODE, layout=layout, tensors=tensors)
    )
    assert (
        reported.total
        == measured_bytes(ArtifactContents(spec=spec, layout=layout, tensors=tensors))
        < 0.97 * len(plain)
    )
    assert_same(read_artifact(tmp_path / "m", layout_of), layout, tensors)


@pytest.mark.parametrize("codec", Codec)
def test_the_overhead_is_known_before_there_are_weights(codec: Codec, tmp_path: Path) -> None:
    """The header to the byte, and texts that do not compress; of many sections and of one."""
    many = [("w", Stored("codes", "i8", (5000, 512))), ("v", Stored("value", "f32", (300, 300)))]
    noise = random.Random(3).randbytes(30_000).hex()
    digests = DataDigests(train=INTERFACE.hex(), val=CODE.hex())
    for layout in ([*LAYOUT_1, *many], [("a", Stored("codes", "i8", (3,)))]):
        for text in (spec_of(layout), spec_of(layout, noise=noise), bytes.fromhex(noise)):
            contents = ArtifactContents(text, layout, random_arrays(layout, 1), trained_on=digests)
            size = write_artifact(tmp_path / "m", contents, quality=1, codec=codec) if text[:1] == b"{" else None
            reported = overhead_bytes(layout, [len(text), 64])
            assert reported >= len(compress(text, 11, codec)) + len(compress(digests.packed(), 11, codec))
            if size is not None:
                texts = [section for section in size.sections if section.kind in ("spec", "data_digests")]
                assert reported - len(text) - 64 - 2 * artifact_sections.CODEC_BYTES == size.header
                assert size.header + sum(section.compressed for section in texts) <= reported


def test_both_codecs_write_what_they_read(tmp_path: Path) -> None:
    tensors = random_arrays(LAYOUT_1, 3)
    for codec in Codec:
        path = tmp_path / codec.name
        write_artifact(
            path,
            ArtifactContents(spec=spec_of(LAYOUT_1), interface=INTERFACE, code=CODE, layout=LAYOUT_1, tensors=tensors),
            codec=codec,
        )
        assert_same(read_artifact(path, layout_of), LAYOUT_1, tensors)
        for raw in (b"", b"\0" * 10**6, random.Random(1).randbytes(10**5)):
            assert b"".join(decompressed(compress(raw, 5, codec), len(raw), "it", codec)) == raw


def test_a_damaged_lzma_stream_is_refused() -> None:
    good = compress(random.Random(2).randbytes(1000), 11, Codec.LZMA)
    for bad in (good[:-1], good[:10], b"", good + b"\0", b"\xff" * 40):
        with pytest.raises(IntegrityError, match=r"^it "):
            list(decompressed(bad, 1000, "it", Codec.LZMA))
    with pytest.raises(IntegrityError, match="expands to more than"):
        list(decompressed(compress(bytes(10**7), 11, Codec.LZMA), 1000, "it", Codec.LZMA))


def test_without_brotli_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "brotli", None)
    with pytest.raises(EnvironmentFailure, match="--codec lzma"):
        codecs.compress(b"", 11)


def test_files_of_version_1_still_load(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(base64.b85decode("".join(VERSION_1.split())))
    assert (tmp_path / "old").read_bytes()[8] == 1
    assert_same(read_artifact(tmp_path / "old", layout_of), LAYOUT_1, random_arrays(LAYOUT_1, 7))
