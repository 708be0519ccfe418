"""Text to documents of tokens: a folder, text files or jsonl, by bytes or a tokenizer of one's own."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv32.training.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

#: Text that Debian ships in every image: some dozen licences, 300 kB of English.
SHIPPED_TEXT = Path("/usr/share/common-licenses")
BYTES = "bytes"
#: Id of the end of a document in the byte tokenizer, after the 256 bytes.
END_OF_BYTES = 256
_TOKENS, _OFFSETS, _ABOUT = "tokens.npy", "offsets.npy", "about.json"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents of tokens, each closed by the end-of-document token, as ``prepare`` wrote them."""

    tokens: NDArray[np.uint32]  # [total], mapped from disk
    offsets: NDArray[np.int64]  # [documents + 1]
    vocabulary: int  # ids are below it
    tokenizer: str
    unigram_entropy: float  # nats a token: the loss of a model that knows only how often each token occurs

    def document(self, number: int) -> NDArray[np.uint32]:
        """Tokens of one document, [n]."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1


def prepare(sources: Sequence[Path], out: Path, *, tokenizer: str = BYTES) -> Corpus:
    """Tokenize every file below ``sources`` and write the corpus to ``out``.

    Args:
        sources: text files, ``.jsonl`` files (one ``{"text": …}`` a line) or folders of both.
        out: folder to write; made if missing.
        tokenizer: ``bytes``, or a folder or name that transformers' AutoTokenizer takes.

    Raises:
        TrainingError: a source is missing or not UTF-8, a jsonl line has no text, or there is no text at all.
    """
    encode, end, vocabulary = _tokenizer(tokenizer)
    documents = [[*encode(text), end] for text in _texts(sources)]
    documents = [document for document in documents if len(document) > 1]
    if not documents:
        raise TrainingError(
            f"no text in {', '.join(map(str, sources))}", "give a folder or files with text: --text PATH"
        )
    tokens = np.fromiter((token for document in documents for token in document), dtype=np.uint32)
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    counts = Counter(tokens.tolist())
    entropy = -sum(n / len(tokens) * math.log(n / len(tokens)) for n in counts.values())
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / _TOKENS, tokens)
    np.save(out / _OFFSETS, offsets)
    about = {"tokenizer": tokenizer, "vocabulary": vocabulary, "unigram_entropy": entropy}
    (out / _ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return Corpus(
        tokens=tokens, offsets=offsets, vocabulary=vocabulary, tokenizer=tokenizer, unigram_entropy=entropy
    )


def load(folder: Path) -> Corpus:
    """Open what ``prepare`` wrote; tokens stay on disk until they are read.

    Raises:
        TrainingError: a file is missing.
    """
    for name in (_TOKENS, _OFFSETS, _ABOUT):
        if not (folder / name).is_file():
            raise TrainingError(f"{folder / name} is missing", "run `prepare` first, and give its --out here")
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    return Corpus(
        tokens=np.load(folder / _TOKENS, mmap_mode="r"),
        offsets=np.load(folder / _OFFSETS),
        vocabulary=about["vocabulary"],
        tokenizer=about["tokenizer"],
        unigram_entropy=about["unigram_entropy"],
    )


def _tokenizer(name: str) -> tuple[Callable[[str], list[int]], int, int]:
    """Encoder, id of the end of a document, number of ids."""
    if name == BYTES:
        return lambda text: list(text.encode()), END_OF_BYTES, END_OF_BYTES + 1
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"tokenizer {name}: {str(error).splitlines()[0]}",
            "give a folder with tokenizer.json, or leave --tokenizer away for bytes",
        ) from error
    if loaded.eos_token_id is None:
        raise TrainingError(f"tokenizer {name} has no end-of-sequence token", "set eos_token in its config")
    return lambda text: list(loaded.encode(text, add_special_tokens=False)), loaded.eos_token_id, len(loaded)


def _texts(sources: Sequence[Path]) -> Iterator[str]:
    for source in sources:
        if not source.exists():
            raise TrainingError(f"{source} does not exist", "give a folder or files with text: --text PATH")
        files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
        for file in files:
            if file.is_symlink() and source.is_dir():
                continue  # the same text again under another name
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise TrainingError(f"{file} is not UTF-8: {error}", "convert it or leave it out") from error
            if file.suffix == ".jsonl":
                yield from _jsonl(file, text)
            else:
                yield text


def _jsonl(file: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield str(json.loads(line)["text"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise TrainingError(
                f'{file}, line {number}: not {{"text": …}} ({error})', "mend the line or leave it out"
            ) from error
