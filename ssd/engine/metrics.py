"""What the engine counts. Names follow what the field has settled on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineMetrics:
    """Totals since the engine started. Work done again after a preemption is not counted again."""

    num_requests: int = 0
    num_finished: int = 0  # aborted ones included
    num_aborted: int = 0
    num_refused: int = 0
    num_rounds: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
