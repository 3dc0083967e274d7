"""The tokenizer for SentencePiece models, `*.model`."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.files import byte_offsets, cores, id_dtype, missing_package, read_file, valid_text
from specc.runtime.data.tokenizers.tokenizer import PieceBytes, TokenArray, Tokenizer

SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer from a SentencePiece `.model` file.

    The tokenizer is not lossless: it normalizes text, and it decodes the character U+2581 to a space. The BOS token of
    the model precedes each document. If the model has no BOS token, its EOS token precedes each document. Text must be
    valid UTF-8.

    Raises DataError if the file is not a valid model. Raises EnvironmentFailure if sentencepiece is not installed.
    """

    lossless = False

    def __init__(self, path: str | Path) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise missing_package(path, "sentencepiece") from None
        data = read_file(Path(path))
        try:
            self._model = SentencePieceProcessor(model_proto=data)
            self.vocab = int(self._model.get_piece_size())
        except (RuntimeError, OSError, ValueError, TypeError):
            self.vocab = 0
        if self.vocab == 0:
            raise DataError(f"{path}: not a SentencePiece model", "copy the .model file again")
        specials = (int(self._model.bos_id()), int(self._model.eos_id()))
        self.bos = next((token for token in specials if token >= 0), None)
        self.name = Path(path).name
        self._digest = hashlib.sha256(b"sentencepiece\0" + data).hexdigest()

    def encode(self, text: bytes) -> TokenArray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        strings = [valid_text(self.name, text) for text in texts]
        lists = self._model.encode(strings, out_type=int, num_threads=cores()) if strings else []
        return [np.array(ids, id_dtype(self.vocab)) for ids in lists]

    def _ends(self, text: bytes, ids: TokenArray) -> npt.NDArray[np.int64]:
        string = text.decode("utf-8")
        offsets = self._model.encode(string, return_type="offset_mapping")["offsets"]
        return byte_offsets(string)[[end for _, end in offsets]]

    def decode(self, ids: Sequence[int] | TokenArray) -> bytes:
        text = self._model.decode(self.checked(ids).tolist(), out_type=str)
        return str(text).encode("utf-8")

    def piece_bytes(self) -> PieceBytes:
        """Returns the table of bytes per token. A space mark (U+2581) inside a piece counts as one byte.

        Raises:
            DataError: if the model has no piece that consists of only the space mark. A space would then become three
                byte tokens or an unknown token, and byte counts would be wrong by about 20 %.
        """
        model, ids = self._model, range(self.vocab)
        pieces = [str(model.id_to_piece(i)) for i in ids]
        is_byte = np.array([model.is_byte(i) for i in ids], np.bool_)
        boundary = np.array([model.is_control(i) or model.is_unknown(i) or model.is_unused(i) for i in ids], np.bool_)
        if not any(piece == SPACE_MARK and not boundary[i] for i, piece in enumerate(pieces)):
            raise DataError(
                f"{self.name}: U+2581 (the space mark) is not a piece, so bytes cannot be counted by pieces",
                "train the model with U+2581 among the required characters, or use another tokenizer",
            )
        space = np.array([piece.startswith(SPACE_MARK) for piece in pieces], np.bool_)
        lengths = [len(piece.removeprefix(SPACE_MARK).replace(SPACE_MARK, " ").encode("utf-8")) for piece in pieces]
        base = np.where(is_byte, 1, np.array(lengths, np.int64))
        base[boundary] = 0
        return PieceBytes(base, space & ~is_byte & ~boundary, boundary)
