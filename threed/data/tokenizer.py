"""Tokenizers: train a byte-level BPE, load a tokenizer.json."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from threed.base.errors import InputError
from threed.data.tokenizer_files import CONFIG, named_ends, read_object, tokenizer_file
from threed.data.wrong_tokenizer import GUIDE, missing, other_kind
from threed.schema import DataConfig

T = TypeVar("T")
EOD = "<|endoftext|>"
EOD_NAMES = (EOD, "</s>", "<|end_of_text|>", "<eos>")
MIN_VOCAB = 257  # the 256 bytes and the end-of-text token
SAMPLE_CHARS = 64 * 2**20
PIECE_CHARS = 2**18


class Tokenizer:
    """A `tokenizers.Tokenizer` reduced to what threed needs.

    `eod`: id of the end-of-text token, or None if it has none; `ends_otherwise`: whether it is another than
    the usual names say. `unknown`: id of the token for text that it has no token for. `bos`: ids that the
    tokenizer itself puts before a text, such as <s>. `vocab_size`: the largest id + 1.
    """

    def __init__(self, inner: tokenizers.Tokenizer, folder: Path | None = None):
        """`folder`: where the files beside it are."""
        # In a corpus nothing is padded or cut, whatever the file says, and "<|endoftext|>" in a text is text.
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True
        self._inner = inner
        self.vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eod = end_token(inner, folder)
        self.ends_otherwise = folder is not None and self.eod != end_token(inner, None)
        unknown = getattr(inner.model, "unk_token", None)
        self.unknown = None if unknown is None else inner.token_to_id(unknown)
        bare, whole = (inner.encode("a", add_special_tokens=added).ids for added in (False, True))
        self.bos: list[int] = whole[:next((at for at in range(len(whole)) if bare
                                           and whole[at:at + len(bare)] == bare), 0)]

    @property
    def end(self) -> str | None:
        """The end-of-text token as it is written."""
        return None if self.eod is None else self._inner.id_to_token(self.eod)

    def read_special_tokens(self) -> None:
        """From now on special tokens in a text are tokens: a chat template writes them so."""
        self._inner.encode_special_tokens = False

    def begun(self, ids: list[int]) -> list[int]:
        """The tokens of a text after `bos`, unless they begin with it already, as a chat template may write
        it."""
        return ids if ids[:len(self.bos)] == self.bos else [*self.bos, *ids]

    def special(self, text: str) -> int | None:
        """The special token at the beginning of a text; None where there is none."""
        known = self._inner.get_added_tokens_decoder()
        first = next(iter(self._inner.encode(text, add_special_tokens=False).ids), None)
        return first if first in known and known[first].special else None

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, with no special token added. Runs on all cores."""
        encoded = answering(lambda: self._inner.encode_batch_fast(texts, add_special_tokens=False))
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        return self._inner.decode(ids, skip_special_tokens=False)


def end_token(inner: tokenizers.Tokenizer, folder: Path | None) -> int | None:
    """The id of the token that ends a document: what the files in `folder` name (`named_ends`), or one of
    EOD_NAMES. An id in the config of a model counts only where the tokenizer knows it as special: a model
    made from defaults has id 2 there, whatever its tokenizer."""
    known = inner.get_added_tokens_decoder()
    for named in named_ends(folder) if folder is not None else ():
        id = inner.token_to_id(named) if isinstance(named, str) else named
        if id is not None and (isinstance(named, str) or (id in known and known[id].special)):
            return id
    return next((id for name in EOD_NAMES if (id := inner.token_to_id(name)) is not None), None)


def load(given: str | Path) -> Tokenizer:
    """Read a tokenizer.json, or that of a folder. Raises InputError if it is missing or is not one."""
    path = tokenizer_file(given)
    if not path.is_file():
        raise InputError(f"data.tokenizer={given}: {missing(path)}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read as a tokenizer: {error.strerror or error}") from None
    try:
        return Tokenizer(tokenizers.Tokenizer.from_str(content.decode("utf-8-sig")), path.parent)
    except InputError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise InputError(other_kind(path, content) or f"{path} is not a tokenizer.json of the Hugging Face "
                         f"tokenizers library: {error}; {GUIDE}") from None


def load_below(path: Path, vocab: int) -> Tokenizer:
    """As `load`. InputError where there are more tokens than `vocab`."""
    tokenizer = load(path)
    if tokenizer.vocab_size > vocab:
        raise InputError(f"data.tokenizer={path} has {tokenizer.vocab_size} tokens, more than "
                         f"model.vocab={vocab}; set model.vocab={tokenizer.vocab_size}")
    return tokenizer


def check_ends(tokenizer: Tokenizer, path: Path, data: DataConfig) -> None:
    """InputError where a tokenizer lacks what documents begin or end with."""
    if data.append_eod and tokenizer.eod is None:
        named = ", ".join(map(repr, named_ends(path.parent)))
        beside = f"what is named beside it ({named}) is no special token of it" if named else \
            "no tokenizer_config.json beside it names an eos_token"
        raise InputError(f"data.append_eod=true, but data.tokenizer={path} has none of the end-of-text "
                         f"tokens {' '.join(EOD_NAMES)}, and {beside}; write "
                         f'{{"eos_token": "THE_TOKEN"}} into {path.with_name(CONFIG)}, or '
                         "set data.append_eod=false")
    if data.prepend_bos and not tokenizer.bos:
        raise InputError(f"data.prepend_bos=true, but data.tokenizer={path} puts no token before a text; "
                         "leave it out")


def keep_end(source: str | Path, kept: Path) -> None:
    """Let a copied tokenizer.json end documents as its source does: where the files beside the copy do not
    say so, its tokenizer_config.json gets the token."""
    end = load(source).end
    if end is not None and load(kept).end != end:
        file = kept.with_name(CONFIG)
        file.write_text(json.dumps({**read_object(file), "eos_token": end}, indent=2), encoding="utf-8")


def train(documents: Iterable[str], vocab: int, path: str | Path) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab` tokens and write it to `path`; the end-of-text token has id
    0.

    The same documents give the same file, byte for byte. A corpus of more than SAMPLE_CHARS characters is
    sampled down to that size: every second, fourth, eighth ... piece, so that the sample spans the corpus.
    """
    if vocab < MIN_VOCAB:
        raise InputError(f"model.vocab={vocab} is too small for data.tokenizer=bpe, which needs 256 bytes "
                         f"and {EOD}: at least {MIN_VOCAB}; raise model.vocab")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    inner.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[EOD], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    answering(lambda: inner.train_from_iterator(_sample(documents, SAMPLE_CHARS), trainer))
    Path(path).write_text(inner.to_str(pretty=True), encoding="utf-8")
    return Tokenizer(inner)


def answering(work: Callable[[], T]) -> T:
    """The result of long work of a library, done on a thread beside this one, which so answers Ctrl-C at
    once."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(work())
        except BaseException as error:  # of the documents, too
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)  # the process does not wait for it at its end
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def pieces(text: str) -> Iterator[str]:
    """Cut a text after line ends into pieces of at most PIECE_CHARS, which bounds memory and feeds all cores.

    The pieces joined are the text; at a cut, tokens may differ from those of the uncut text.
    """
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind("\n", start, start + PIECE_CHARS) + 1
        end = end if end > start else start + PIECE_CHARS
        yield text[start:end]
        start = end
    yield text[start:]


def _sample(documents: Iterable[str], limit: int) -> list[str]:
    """Pieces 0, stride, 2 stride, ... for the least power of two that keeps them within `limit`
    characters."""
    kept: list[str] = []
    size, stride = 0, 1
    for number, piece in enumerate(piece for text in documents for piece in pieces(text)):
        if number % stride == 0:
            kept.append(piece)
            size += len(piece)
        while size > limit and len(kept) > 1:
            kept, stride = kept[::2], 2 * stride
            size = sum(map(len, kept))
    return kept
