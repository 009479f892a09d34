"""The layers split over several ranks give the logits of one, and a row's bits do not depend on the batch."""

from __future__ import annotations

import math
import queue
import shutil
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bits import same_bits
from fakes import make_sequence
from random_weights import RandomCheckpoint
from safetensors.torch import save_file
from split_models import TOKENS, loaded, logits, logits_of, on_ranks

from ssd.core import Work
from ssd.drafting.fan_out import Adaptive
from ssd.drafting.model import DraftModel
from ssd.drafting.runner import DraftRunner
from ssd.drafting.shapes import RunShapes
from ssd.drafting.ssd import SSDDrafter
from ssd.errors import ConfigError
from ssd.execution.runner import ModelRunner
from ssd.execution.state import SequenceState
from ssd.grafts.shapes import SHAPES
from ssd.layers.formats.rounded import rounded
from ssd.models.checkpoint import FileTensor, HFCheckpoint
from ssd.models.config import DecoderConfig, equal_layers
from ssd.models.decoder import check_split, parameter_shapes
from ssd.parallel import tensor
from ssd.parallel.tensor import TensorParallel

if TYPE_CHECKING:
    from conftest import TestModel

CPU = torch.device("cpu")
ODD = equal_layers("llama", 1003, 48, 60, 2, 6, 2, 8, 64)  # 6 heads of 2 KV heads, a vocabulary that nothing divides


def opened(make_model: Callable[[str], TestModel], kind: str) -> HFCheckpoint:
    return HFCheckpoint.open(Path(make_model(kind).path))


@pytest.mark.parametrize(
    ("kind", "size"),
    [("llama-biased", 2), ("qwen3", 2), ("llama-tied", 4), pytest.param("llama3-scaled", 8, marks=pytest.mark.slow)],
)
def test_ranks_equal_one(make_model: Callable[[str], TestModel], kind: str, size: int) -> None:
    """Catches a wrong slice, a bias added twice, a residual added per rank, a vocabulary split or gathered wrongly, and
    KV heads that are fewer than ranks (llama-tied: 2 on 4 ranks) given to the wrong one."""
    checkpoint = opened(make_model, kind)
    split = on_ranks(size, lambda tp: logits(checkpoint, tp))[0]
    assert (split - logits(checkpoint, TensorParallel())).abs().max() < 1e-4


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_ranks_of_a_rounded_model_equal_one(form: str) -> None:
    """Catches scales of a rank's columns alone, which make another model."""
    plain = RandomCheckpoint(equal_layers("llama", 320, 64, 192, 2, 4, 2, 16, 64))
    checkpoint = replace(plain, formats=rounded(form, exact=True))
    one, split = logits(checkpoint, TensorParallel()), on_ranks(2, lambda tp: logits(checkpoint, tp))[0]
    assert (split - one).norm() < 1e-5 * one.norm()
    assert (logits(plain, TensorParallel()) - one).norm() > 1e-3 * one.norm()  # it is rounded


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_a_model_of_different_heads_equal_one(size: int) -> None:
    """KV heads are cut in one layer, and the same on several ranks in another."""
    layer = ODD.layer
    heads = (replace(layer.attention, num_heads=n, num_kv_heads=kv, head_dim=d) for n, kv, d in ((8, 4, 8), (4, 1, 24)))
    layers = tuple(replace(layer, attention=each) for each in heads)
    checkpoint = RandomCheckpoint(replace(ODD, layers=layers * 2))
    one, split = logits(checkpoint, TensorParallel()), on_ranks(size, lambda tp: logits(checkpoint, tp))[0]
    assert (split - one).norm() < 1e-5 * one.norm()


def test_ranks_have_the_scales_of_the_kv_cache(make_model: Callable[[str], TestModel], tmp_path: Path) -> None:
    """In fp8; from a file that is read in shares, where some of them have no dimension. Catches ranks without them."""
    shutil.copytree(make_model("llama-tied").path, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    name = "model.layers.{}.self_attn.{}_scale"
    scales = {name.format(i, kind): torch.tensor(0.02 + i) for i in range(3) for kind in "kv"}
    save_file(scales, tmp_path / "m" / "scales.safetensors")
    checkpoint = HFCheckpoint.open(tmp_path / "m")

    def run(tp: TensorParallel) -> torch.Tensor:
        decoder = loaded(checkpoint, tp, torch.float8_e4m3fn)
        found = [layer.attention.kv_scales.value for layer in decoder.layers]
        assert [each.k for each in found] == [each.v for each in found] == [pytest.approx(0.02 + i) for i in range(3)]
        assert decoder.kv_bytes_per_token == 2 * 3 * 16 * (2 // tp.size)
        return logits_of(decoder)

    whole, ranks = run(TensorParallel()), on_ranks(2, run)
    assert len(ranks) == 2
    assert (ranks[0] - whole).norm() < 1e-2 * whole.norm()  # a sum in another order may round a key to the next code


class Queued:
    """Rank 0's messages to another rank that is a thread."""

    failure = None

    def __init__(self) -> None:
        self.messages: queue.Queue[Any] = queue.Queue()

    @contextmanager
    def launching(self, key: Seq[int], *, draft: bool = False) -> Iterator[None]:
        self.messages.put((draft, tuple(key)))
        yield

    def follow(self, runner: ModelRunner, draft: DraftRunner) -> None:
        while (message := self.messages.get()) is not None:
            kind, argument = message
            if kind == "tables":
                runner.tables.write(*argument)
            elif kind:
                draft.follow(argument, Adaptive())
            else:
                runner.run(runner.staged(argument))


def drafted(checkpoint: HFCheckpoint, tp: TensorParallel, queued: Queued) -> torch.Tensor:
    """On rank 0: the drafts of three sequences, and all that is prepared while they are verified."""
    decoder, k, rows = loaded(checkpoint, tp), 3, 15
    state = SequenceState(3, max_len=32, lookahead=k, vocab_size=decoder.config.vocab_size, device=CPU)
    shapes = RunShapes(lookahead=k, max_sequences=3, max_rows=rows, widths=(5,))
    scratch = shapes.scratch_slots
    runner = ModelRunner(decoder, state, num_blocks=16, block_size=4, max_decode_rows=rows, scratch_slots=scratch)
    draft = DraftRunner(runner, shapes)
    if tp.rank:
        queued.follow(runner, draft)
        return torch.zeros(0)
    if tp.size > 1:
        runner.followers = queued  # type: ignore[assignment]
        runner.tables.on_write = lambda *written: queued.messages.put(("tables", written))
    drafter = SSDDrafter(DraftModel(draft, max_len=32, max_num_batched_tokens=8), Adaptive(), lookahead=k, budget=5)
    sequences = [make_sequence(TOKENS[i : 4 * i + 5], TOKENS[:1], id=i) for i in range(3)]
    for slot, sequence in enumerate(sequences):
        state.admit(slot, sequence)
    works = [Work(s, 1, len(s.tokens) - 1, lookahead=k, slot=i) for i, s in enumerate(sequences)]
    works = [work.with_proposal(proposal) for work, proposal in zip(works, drafter.propose(works), strict=True)]
    drafter.settle(works)
    drafter.prepare(works)
    queued.messages.put(None)
    found = [drafter.prepared(sequence) for sequence in sequences]
    assert all(len(outcomes) == 5 for outcomes in found)
    prepared = [[*outcome, *tokens] for outcomes in found for outcome, tokens in outcomes.items()]
    return torch.cat((state.drafts[:3].flatten(), torch.tensor(prepared).flatten()))


@pytest.mark.parametrize("kind", ["qwen3", "llama-tied"])
def test_a_draft_model_on_two_ranks_drafts_what_it_drafts_on_one(
    make_model: Callable[[str], TestModel], kind: str
) -> None:
    """Catches inputs of reading or of branches that do not reach the other rank, and KV that it has elsewhere.

    Random weights are decisive: no two scores are as close as the sums.
    """
    checkpoint, queued = opened(make_model, kind), Queued()
    split = on_ranks(2, lambda tp: drafted(checkpoint, tp, queued))[0]
    assert split.tolist() == drafted(checkpoint, TensorParallel(), Queued()).tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_a_vocabulary_that_does_not_divide_is_padded(size: int) -> None:
    config = ODD if size == 2 else replace(ODD.with_layers(num_kv_heads=3), tie_embeddings=True)
    checkpoint = RandomCheckpoint(config)
    tokens = [0, 1002, 501, 502, 334, 335, 668, 669]  # at the borders of the shares
    split = on_ranks(size, lambda tp: logits(checkpoint, tp, tokens))[0]
    assert split.shape == (8, 1003)
    assert (split - logits(checkpoint, TensorParallel(), tokens)).abs().max() < 1e-4


def test_partial_sums_are_added_in_order_of_rank_whatever_the_batch() -> None:
    """Any other order, or a rounding before the last, gives another number: (2^24 + 1) - 2^24 is 0 in float32."""
    values = [2.0**24, 1.0, -(2.0**24), 3.0]

    def total(tp: TensorParallel) -> torch.Tensor:
        sums = [tp.sum(torch.full((rows, 5), values[tp.rank]), torch.float32) for rows in (1, 2, 700)]
        close = [1.0 + 2.0**-8, -1.0, 0.0, 0.0]  # the first is 1 in bfloat16
        assert float(tp.sum(torch.full((1, 1), close[tp.rank]), torch.bfloat16)) == 2.0**-8
        return torch.cat(sums)

    for found in on_ranks(4, total):
        assert found.unique().tolist() == [3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_sums_have_the_bits_of_small_ones(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Those that are added by shares: the bytes are fewer, the order of additions and the one rounding the same."""

    def total(tp: TensorParallel) -> torch.Tensor:
        partial = torch.randn((6, 35), generator=torch.Generator().manual_seed(tp.rank)).exp()
        return torch.cat([tp.sum(partial[:rows], dtype) for rows in (6, 3, 1)])  # 35 is not divisible: not by shares

    small = on_ranks(3, total)
    monkeypatch.setattr("ssd.parallel.tensor.MESSAGE_BYTES", 0)
    large = on_ranks(3, total)
    assert len(small) == len(large) == 3
    for found in (*small, *large):
        assert same_bits(found, small[0])


@dataclass(frozen=True)
class Counted:
    """A group that counts the bytes that its rank receives."""

    group: Any
    size: int
    sums: list[int]
    logits: list[int]

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        return self.group.broadcast(tensor, root)

    def _allgather_base(self, out: torch.Tensor, part: torch.Tensor) -> Any:
        self.sums.append(out.nbytes - part.nbytes)
        return self.group._allgather_base(out, part)

    def alltoall_base(self, out: torch.Tensor, part: torch.Tensor, *splits: list[int]) -> Any:
        self.sums.append(out.nbytes - out.nbytes // self.size)
        return self.group.alltoall_base(out, part, *splits)

    def gather(self, parts: list[list[torch.Tensor]], part: list[torch.Tensor], options: Any) -> Any:
        self.logits.append(sum(each.nbytes for each in parts[0][1:]) if parts else 0)
        return self.group.gather(parts, part, options)


def received(config: DecoderConfig, size: int, rows: int, itemsize: int) -> tuple[int, int]:
    """Bytes that a rank receives in a forward pass: of all sums, and, rank 0, of the logits of all rows."""
    elements, num_sums = rows * config.hidden_size, 1 + 2 * config.num_layers
    gathered, by_shares = 4 * elements * (size - 1), (4 + itemsize) * elements * (size - 1) // size
    vocabulary = -(-config.vocab_size // size)
    each = by_shares if gathered - by_shares >= tensor.MESSAGE_BYTES else gathered
    return num_sums * each, 4 * rows * vocabulary * (size - 1)


@pytest.mark.parametrize("message_bytes", [4 << 20, 0])
def test_bytes_that_ranks_receive(
    make_model: Callable[[str], TestModel], monkeypatch: pytest.MonkeyPatch, message_bytes: int
) -> None:
    """Catches a sum more than one for the embedding and two for a layer, and logits that go to other ranks."""
    monkeypatch.setattr(tensor, "MESSAGE_BYTES", message_bytes)
    checkpoint = opened(make_model, "llama-biased")

    def count(tp: TensorParallel) -> torch.Tensor:
        group = Counted(tp.group, tp.size, [], [])
        logits(checkpoint, TensorParallel(tp.rank, tp.size, group), TOKENS[:8])
        return torch.tensor([sum(group.sums), sum(group.logits)])

    sums, gathered = received(checkpoint.config, 4, 8, 4)
    assert [each.tolist() for each in on_ranks(4, count)] == [[sums, gathered], *[[sums, 0]] * 3]


def test_the_table_of_bytes_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
    for rows in (1, 8, 64, 512, 4096):
        each = [received(SHAPES["llama-3.1-70b"], size, rows, 2) for size in (2, 4, 8)]
        cells = [f"{sums / 1e6:,.0f} MB" for sums, _ in each] + [f"{logits / 1e6:.2f} MB" for _, logits in each]
        line = f"| {rows:,} | {' | '.join(cells if rows < 512 else [*cells[:3], '', '', ''])} |"
        assert line in text, line


def test_bits_of_a_row_do_not_depend_on_the_batch_when_split(make_model: Callable[[str], TestModel]) -> None:
    checkpoint = opened(make_model, "qwen3")
    whole = on_ranks(2, lambda tp: logits(checkpoint, tp))[0]
    part = on_ranks(2, lambda tp: logits(checkpoint, tp, TOKENS[:7]))[0]
    assert same_bits(part, whole[:7])


def test_a_rank_reads_its_share_only(make_model: Callable[[str], TestModel], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    take = FileTensor.__getitem__

    def counted(self: FileTensor, index: tuple[slice, ...]) -> torch.Tensor:
        part = take(self, index)
        read.append(part.numel())
        return part

    monkeypatch.setattr(FileTensor, "__getitem__", counted)
    checkpoint = opened(make_model, "llama3-scaled")
    sizes = []
    for rank in range(2):
        read.clear()
        loaded(checkpoint, TensorParallel(rank, 2))
        sizes.append(sum(read))
    whole = sum(math.prod(shape) for shape in parameter_shapes(checkpoint.config).values())
    vectors = sum(math.prod(shape) for shape in parameter_shapes(checkpoint.config).values() if len(shape) == 1)
    assert sizes == [(whole + vectors) // 2] * 2


@pytest.mark.parametrize(("size", "possible"), [(4, "1, 2, 6"), (3, "1, 2, 6"), (5, "1, 2, 6")])
def test_heads_that_cannot_be_split_are_refused_with_the_numbers(size: int, possible: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"tensor_parallel_size={size} cannot split a model with num_heads=6, num_kv_heads=2, "
        f"intermediate_size=60: use one of {possible}$",
    ):
        check_split(ODD, size)
