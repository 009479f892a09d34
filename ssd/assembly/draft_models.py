"""Opens and loads the draft model or head."""

from __future__ import annotations

import torch

from ssd.assembly.device import kv_block_size
from ssd.assembly.memory import Loaded
from ssd.assembly.models import load_decoder
from ssd.assembly.open import open_checkpoint, open_feature_draft
from ssd.assembly.placement import prepares_here
from ssd.config import MOST_TREE_ROWS, MTP, SUFFIX, EngineConfig, SpeculationConfig
from ssd.drafting.head import private_blocks
from ssd.drafting.shapes import RunShapes, widths_up_to
from ssd.drafting.tree import beams_of
from ssd.errors import ConfigError
from ssd.execution.state import SequenceState
from ssd.models.block import BlockCheckpoint
from ssd.models.checkpoint import Checkpoint, HFCheckpoint
from ssd.models.decoder import Decoder
from ssd.models.feature_draft import FeatureCheckpoint
from ssd.models.mtp import MTPCheckpoint
from ssd.parallel.tensor import TensorParallel
from ssd.text.tokenizer import Tokenizer

_MAX_BRANCHES = 256  # of a whole batch


def open_draft(
    speculation: SpeculationConfig, target: Checkpoint, tokenizer: Tokenizer
) -> Checkpoint | FeatureCheckpoint | None:
    """The checkpoint of the draft model or head, or None; ConfigError if it does not fit the target."""
    name = speculation.draft_model
    if name is None:
        return None
    draft = _own_head(target) if name == MTP else open_feature_draft(name)
    if draft is not None:
        draft = draft.for_target(target)
        return _checked(draft, speculation) if isinstance(draft, BlockCheckpoint) else draft
    checkpoint = open_checkpoint(name, "speculation draft")
    difference = tokenizer.difference(checkpoint.tokenizer())
    if difference is not None:
        raise ConfigError(
            f"speculation draft={speculation.draft!r} has another tokenizer than the target ({difference}): use a "
            f"draft of the same family, or draft={SUFFIX!r}, which needs no model"
        )
    return checkpoint


def _own_head(target: Checkpoint) -> MTPCheckpoint:
    if not isinstance(target, HFCheckpoint):
        raise ConfigError(
            f"speculation draft={MTP!r}: the MTP head is read from the model's directory of safetensors, and this is a "
            f"{'GGUF file' if target.path.is_file() else 'graft'}: use another draft"
        )
    return MTPCheckpoint.of(target)


def _checked(block: BlockCheckpoint, speculation: SpeculationConfig) -> BlockCheckpoint:
    """ConfigError for options that a block draft cannot have."""
    draft, most = f"speculation draft={speculation.draft!r}: a block draft", block.config.most_drafted
    if speculation.mode == "ssd":
        raise ConfigError(f'{draft} writes a whole draft in one pass, and nothing is prepared: use mode="sd"')
    if speculation.options_of_ssd:
        raise ConfigError(f"{draft} has no option {', '.join(speculation.options_of_ssd)}: leave it out")
    if speculation.acceptance != "coupled":
        raise ConfigError(f'{draft} has no acceptance="rejection": use the coupled rule')
    for name, value in (("k", speculation.k), ("k_max", speculation.k_max)):
        if isinstance(value, int) and value > most:
            raise ConfigError(
                f"{draft} of block_size={block.config.block_size} writes at most {most} tokens: lower {name}"
            )
    return block


def load_draft(
    config: EngineConfig,
    draft: Checkpoint | FeatureCheckpoint,
    state: SequenceState,
    limit: int,
    target: Decoder | None = None,
    tp: TensorParallel = TensorParallel(),  # noqa: B008 (frozen)
    engines: int = 1,
) -> Loaded:
    """Loads the draft model or head. Its batches read K + 1 tokens per sequence, and its positions go K + 1 further.

    `engines`: that share it, each with KV slots for its branches.
    """
    shapes, head = run_shapes(config, state.device), isinstance(draft, FeatureCheckpoint)
    scratch = engines * shapes.scratch_slots
    if head and shapes.max_width:
        size = kv_block_size(config, state.device)
        scratch += config.max_num_seqs * private_blocks(shapes.lookahead, size) * size
    return load_decoder(
        config,
        draft,
        state,
        limit if head else min(limit, draft.config.max_position),
        max(shapes.max_rows, config.max_num_seqs * (shapes.reads + shapes.nodes)),
        beyond=2 * shapes.reads,
        scratch_slots=scratch,
        target=target if head else None,
        tp=tp,
    )


def run_shapes(config: EngineConfig, device: torch.device) -> RunShapes:
    """Rows of a draft run: one per sequence, or its branches, up to _MAX_BRANCHES.

    On a CPU, where fewer branches take less time, there are shapes for smaller numbers of them, too.
    """
    speculation, sequences, on_cuda = config.speculation, config.max_num_seqs, device.type == "cuda"
    rows, nodes, widths = sequences, speculation.nodes, tuple[int, ...]()
    if nodes:
        beams = rows * beams_of(nodes)
        rows = beams if speculation.tree != "auto" else max(rows, min(beams, MOST_TREE_ROWS))
    if prepares_here(speculation):
        widths = speculation.budgets if on_cuda else widths_up_to(max(speculation.budgets))
        rows = max(rows, min(_MAX_BRANCHES, sequences * max(widths)))
    return RunShapes(speculation.lookahead, sequences, rows, widths, bucketed=on_cuda, nodes=nodes if widths else 0)
