"""A draft model for several engines: weights, KV blocks and prefixes are shared, all else an engine has for itself."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from ssd.assembly.device import kv_block_size, make_current, resolve_device
from ssd.assembly.draft_models import load_draft, run_shapes
from ssd.assembly.draft_runners import make_fan_out, ssd_drafter
from ssd.assembly.memory import kv_blocks, num_slots
from ssd.assembly.models import make_runner, make_state
from ssd.assembly.open import open_checkpoint, open_feature_draft
from ssd.config import EngineConfig
from ssd.drafting.joint import JointPass
from ssd.drafting.model import DraftModel
from ssd.drafting.runner import DraftRunner
from ssd.drafting.ssd import SSDDrafter
from ssd.drafting.turns import Turns
from ssd.drafting.wire import Hello
from ssd.drafting.worker import WorkerDrafter
from ssd.errors import ConfigError
from ssd.execution.state import DeviceBlockTables, SequenceState
from ssd.kernels.cpu.threads import set_threads
from ssd.kernels.ops import DeviceBatch
from ssd.kv.blocks import BlockPool

_PROMPT_TOKENS = {"cpu": 64, "cuda": 512}  # of a prompt, read between two steps of the other engines
_MOST_ROWS = 256  # of a joined pass


class SharedDraft:
    """The draft model of a draft server, with places for `max_engines` engines.

    `config`: `max_num_seqs`, k and budget are the most that one engine may have.
    """

    def __init__(self, config: EngineConfig, max_engines: int) -> None:
        name = str(config.speculation.draft)
        if open_feature_draft(name, "draft") is not None:
            raise ConfigError(
                f"draft={name!r} reads the target's hidden states, which engines do not send: name a draft model"
            )
        checkpoint = open_checkpoint(name, "draft")
        self.name, self.config, self.device = name, config, resolve_device(config.device)
        self.vocabulary, self.tokenizer = checkpoint.tokenizer().hashes
        self.vocab_size = checkpoint.config.vocab_size
        self.max_len = config.max_model_len or checkpoint.config.max_position
        self.threads = (config.speculation.draft_threads or 1) if self.device.type == "cpu" else 0
        self.enter_thread()
        shapes, slots = run_shapes(config, self.device), num_slots(config) + 1
        state = make_state(config, self.max_len, self.vocab_size, self.device)
        loaded = load_draft(config, checkpoint, state, self.max_len, engines=max_engines)
        every = replace(config, max_num_seqs=max_engines * config.max_num_seqs)
        blocks = kv_blocks(every, [loaded], loaded.max_len)
        columns = -(-state.max_positions // kv_block_size(config, self.device))
        self._tables = DeviceBlockTables(max_engines * slots - 1, columns, self.device)
        self._runner = make_runner(config, loaded, state, blocks, self._tables)
        self.pool = BlockPool(blocks, self._runner.block_size)
        self._decoder, self._places = loaded.decoder, list(range(max_engines))
        self._slots, self._scratch = slots, shapes.scratch_slots
        join = JointPass(loaded.decoder, self._runner.kv, self._tables.tensor)
        self.turns = Turns(join if self.device.type == "cpu" else self._one_by_one, _MOST_ROWS)
        self._lock = threading.Lock()

    def enter_thread(self) -> None:
        """Called by each thread that computes."""
        make_current(self.device)
        if self.threads:
            set_threads(self.threads)

    @property
    def free_places(self) -> int:
        return len(self._places)

    def open(self, hello: Hello, owner: str) -> tuple[WorkerDrafter, int]:
        """The drafter of an engine, and its place until `close`. `owner`: of its prefixes."""
        with self._lock:
            if not self._places:
                raise ConfigError("all places for engines are taken: raise --max-engines there")
            place = self._places.pop()
        try:
            return self._open(hello, owner, place), place
        except BaseException:
            self._free(place)
            raise

    def _open(self, hello: Hello, owner: str, place: int) -> WorkerDrafter:
        speculation = replace(self.config.speculation, k=hello.k, budget=hello.budget, backup=hello.backup)  # type: ignore[arg-type]
        own = replace(self.config, max_num_seqs=hello.max_sequences, speculation=speculation)
        state = SequenceState(
            self._slots - 1,
            max_len=hello.max_len,
            lookahead=hello.k,
            vocab_size=hello.vocab_size,
            device=self.device,
        )
        tables = self._tables.part(place * self._slots, self._slots - 1)
        runner = self._runner.for_state(state, tables, self._runner.scratch_slot + place * self._scratch)
        model = DraftModel(
            DraftRunner(runner, run_shapes(own, self.device), turns=self.turns),
            max_len=self._decoder.config.max_position,
            max_num_batched_tokens=_PROMPT_TOKENS[self.device.type],
            pool=self.pool,
            owner=owner,
        )
        return WorkerDrafter(ssd_drafter(model, speculation, make_fan_out(speculation)), state)

    def close(self, worker: WorkerDrafter, place: int) -> None:
        """Frees what an engine has; in a turn of the calling thread."""
        for sequence_id in list(worker.sequences):
            worker.forget(sequence_id)
        assert isinstance(worker.drafter, SSDDrafter)
        worker.drafter.runner.graphs.clear()
        if self._decoder.recordings is not None:
            self._decoder.recordings.clear()  # some are of the engine's memory
        self._free(place)

    def _free(self, place: int) -> None:
        with self._lock:
            self._places.append(place)

    def _one_by_one(self, batches: Seq[DeviceBatch]) -> list[torch.Tensor]:
        return [self._decoder(batch, self._runner.kv) for batch in batches]
