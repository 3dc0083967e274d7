"""Text, token shards, tokenizers, streams, the training loader, and bits per byte."""

from specc.runtime.data.bits import BitsPerByte, evaluate_bits
from specc.runtime.data.characters import CharTokenizer
from specc.runtime.data.corpus import documents
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.loader import Loader, Order
from specc.runtime.data.shards import ShardWriter, Split, TokenShard
from specc.runtime.data.stream import TokenStream, open_stream
from specc.runtime.data.tokenizer import (
    ByteTokenizer,
    PieceBytes,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    open_tokenizer,
    tokenizer_files,
)

__all__ = [
    "BitsPerByte",
    "ByteTokenizer",
    "CharTokenizer",
    "DataError",
    "DataIntegrityError",
    "Loader",
    "Order",
    "PieceBytes",
    "SentencePieceTokenizer",
    "ShardWriter",
    "Split",
    "TiktokenTokenizer",
    "TokenShard",
    "TokenStream",
    "Tokenizer",
    "documents",
    "evaluate_bits",
    "open_stream",
    "open_tokenizer",
    "tokenizer_files",
]
