"""Text to documents to samples: nothing lost, nothing twice, no document sees another."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

from dsv32.mcore.packing import packed_params, padded_length, zigzag_rows
from dsv32.training import text
from dsv32.training.batch import packed_batch, padded_batch
from dsv32.training.errors import TrainingError
from dsv32.training.samples import Samples

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


@pytest.fixture
def corpus(tmp_path: Path) -> text.Corpus:
    """Documents of 1 to 400 bytes, each of bytes of its own so that a mix-up shows."""
    source = tmp_path / "source"
    source.mkdir()
    for number, length in enumerate((400, 1, 37, 120, 64, 8, 250)):
        (source / f"{number}.txt").write_text(chr(ord("a") + number) * length, encoding="utf-8")
    return text.prepare([source], tmp_path / "corpus")


def test_prepare_keeps_every_byte_and_says_the_entropy(tmp_path: Path, corpus: text.Corpus) -> None:
    assert [len(corpus.document(number)) for number in range(len(corpus))] == [401, 2, 38, 121, 65, 9, 251]
    assert bytes(corpus.document(2)[:-1].astype("uint8")) == b"c" * 37
    assert corpus.document(2)[-1] == text.END_OF_BYTES
    counts = Counter(corpus.tokens.tolist())
    total = sum(counts.values())
    wanted = -sum(count / total * math.log(count / total) for count in counts.values())
    assert corpus.unigram_entropy == pytest.approx(wanted, rel=1e-12)
    again = text.load(tmp_path / "corpus")
    assert again.tokens.tolist() == corpus.tokens.tolist()
    assert again.vocabulary == 257


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("thd", [True, False], ids=["thd", "sbhd"])
def test_an_epoch_predicts_every_token_once(corpus: text.Corpus, thd: bool, rows: int) -> None:
    samples = Samples(corpus=corpus, rows=rows, thd=thd, multiple=8, seed=1)
    seen: Counter[tuple[int, int]] = Counter()
    order = []
    for number in range(samples._count):
        pieces = samples.documents(number)
        order.append([piece.tolist() for piece in pieces])
        assert sum(padded_length(len(piece) - 1, multiple=8 if thd else 1) for piece in pieces) <= rows
        for piece in pieces:
            if thd:  # all of one letter, but for the end of its document
                assert len(set(piece.tolist()) - {text.END_OF_BYTES}) <= 1
            seen.update(zip(piece[:-1].tolist(), piece[1:].tolist(), strict=True))
    wanted: Counter[tuple[int, int]] = Counter()
    streams = [corpus.document(number) for number in range(len(corpus))] if thd else [corpus.tokens]
    for stream in streams:
        used = stream if thd else stream[: (len(stream) - 1) // rows * rows + 1]
        wanted.update(zip(used[:-1].tolist(), used[1:].tolist(), strict=True))
    assert seen == wanted
    second = [[p.tolist() for p in samples.documents(samples._count + n)] for n in range(samples._count)]
    assert sorted(second) == sorted(order), "the second epoch has other samples"
    assert second != order, "the second epoch has the same order"
    again = Samples(corpus=corpus, rows=rows, thd=thd, multiple=8, seed=1)
    assert [p.tolist() for p in again.documents(1)] == order[1], "the seed does not decide"


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_packed_batch_of_all_ranks_is_the_whole(cp_size: int) -> None:
    documents = [torch.arange(base, base + length) for base, length in ((10, 30), (50, 9), (70, 2), (90, 50))]
    parts = [
        packed_batch(documents, rows=128, multiple=8, cp_size=cp_size, cp_rank=rank, device=CPU)
        for rank in range(cp_size)
    ]
    packed = parts[0].packed
    assert packed is not None
    padded = (packed.cu_seqlens_q_padded[1:] - packed.cu_seqlens_q_padded[:-1]).tolist()
    assert padded == [32, 8, 8, 80]
    assert (packed.cu_seqlens_q[1:] - packed.cu_seqlens_q[:-1]).tolist() == [29, 8, 1, 49]
    order = torch.cat([zigzag_rows(padded, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)])
    back = order.argsort()
    tokens, labels, mask, positions = (
        torch.cat([getattr(part, name)[0] for part in parts])[back]
        for name in ("tokens", "labels", "loss_mask", "positions")
    )
    real = mask.bool()
    assert tokens[real].tolist() == [token for document in documents for token in document[:-1].tolist()]
    assert labels[real].tolist() == [token for document in documents for token in document[1:].tolist()]
    assert positions.tolist() == [place for room in padded for place in range(room)]
    shown = torch.cat([part.packed.real_token_mask_q for part in parts if part.packed is not None])[back]
    assert torch.equal(shown, real), "the indexer's loss counts other rows than the model's"


def test_padded_batch_predicts_the_next_token() -> None:
    sequences = torch.arange(2 * 17).view(2, 17)
    for rank in range(2):
        batch = padded_batch(sequences, cp_size=2, cp_rank=rank, device=CPU)
        assert torch.equal(batch.labels, batch.tokens + 1)
        assert torch.equal(batch.positions[0], zigzag_rows([16], cp_size=2, cp_rank=rank))


def test_what_does_not_fit_is_refused(tmp_path: Path, corpus: text.Corpus) -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        zigzag_rows([6], cp_size=2, cp_rank=0)
    with pytest.raises(ValueError, match="do not fit"):
        packed_params([5], padded_lengths=[4])
    with pytest.raises(ValueError, match="more than 16"):
        packed_batch([torch.arange(20)], rows=16, multiple=4, cp_size=1, cp_rank=0, device=CPU)
    with pytest.raises(TrainingError, match="not enough for one sample"):
        Samples(corpus=corpus, rows=4096, thd=False, multiple=1, seed=1)


def test_bad_text_is_refused(tmp_path: Path) -> None:
    good, bad = {"text": "hello"}, {"body": "hello"}
    lines = tmp_path / "some.jsonl"
    lines.write_text(f"{json.dumps(good)}\n\n{json.dumps(good)}\n", encoding="utf-8")
    assert len(text.prepare([lines], tmp_path / "a")) == 2
    lines.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n", encoding="utf-8")
    with pytest.raises(TrainingError, match="line 2"):
        text.prepare([lines], tmp_path / "a")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    with pytest.raises(TrainingError, match="not UTF-8"):
        text.prepare([tmp_path / "latin.txt"], tmp_path / "a")
    with pytest.raises(TrainingError, match="does not exist"):
        text.prepare([tmp_path / "absent"], tmp_path / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainingError, match="no text"):
        text.prepare([tmp_path / "empty"], tmp_path / "a")
    with pytest.raises(TrainingError, match="prepare"):
        text.load(tmp_path / "empty")
    with pytest.raises(TrainingError, match="tokenizer"):
        text.prepare([lines], tmp_path / "a", tokenizer=str(tmp_path / "no-tokenizer"))
