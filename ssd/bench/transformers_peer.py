"""`transformers` as a contender, in this process: `generate`, and assisted generation if there is a draft.

It gets the same token ids as ssd, and ignores the sampling defaults of a checkpoint. transformers is imported when a
contender is created.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence as Seq
from typing import Any

import torch

from ssd.assembly.device import resolve_device, resolve_dtype
from ssd.assembly.open import GRAFT_PREFIX, open_checkpoint
from ssd.bench.answers import Answer, Prompt, RequestSettings
from ssd.bench.workload import encode
from ssd.config import K_DEFAULT, EngineConfig
from ssd.errors import ConfigError, RequestError, UnsupportedModel, install_extra
from ssd.models.checkpoint import Checkpoint
from ssd.options import build


class HFContender:
    """`model` and `draft`: anything that ssd opens from files; `device` and `dtype` as in ssd.

    The draft writes `k` tokens per round, whatever its confidence.
    """

    def __init__(
        self,
        model: str,
        draft: str | None = None,
        *,
        k: int = K_DEFAULT,
        device: str = "auto",
        dtype: str = "auto",
        name: str = "",
    ) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ConfigError(f"peer hf: transformers is not installed: {install_extra('hf')}") from error
        check(model, draft)
        config = build(EngineConfig, {"model": model, "device": device, "dtype": dtype})
        checkpoint = files_of(model)
        self.name = name or (f"transformers sd:{k}" if draft else "transformers")
        self.note = "; ".join(filter(None, [f"transformers {transformers.__version__}", checkpoint.note]))
        self._device = resolve_device(config.device)
        self._dtype = resolve_dtype(config, checkpoint.config, self._device)
        self._tokenizer = checkpoint.tokenizer()
        self._stop_token_ids = checkpoint.stop_token_ids
        small = files_of(draft, "draft") if draft else None
        self._model: Any = self._loaded(checkpoint)
        self._draft: Any = None
        if small is not None:
            self._draft = self._loaded(small)
            settings = self._draft.generation_config
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
            settings.assistant_confidence_threshold = 0.0

    def answer(self, prompts: Seq[Prompt], asked: RequestSettings) -> list[Answer]:
        """Answers in the order of the prompts. Static batches, padded on the left."""
        if self._draft is not None:
            _check_batch(asked.batch)
        tokens = [self._encode(prompt) for prompt in prompts]
        batches = [tokens[first : first + asked.batch] for first in range(0, len(tokens), asked.batch)]
        return [answer for batch in batches for answer in self._generate(batch, asked)]

    def close(self) -> None:
        self._model = self._draft = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _loaded(self, checkpoint: Checkpoint) -> Any:
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging

        path, options = checkpoint.path, {}
        if path.is_file():
            path, options = path.parent, {"gguf_file": path.name}
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # it would stay on the terminal
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=self._dtype, **options)
        except (ImportError, OSError, ValueError, RuntimeError) as error:
            raise UnsupportedModel(f"{checkpoint.path} cannot be loaded by transformers: {error}") from error
        finally:
            if bars:
                logging.enable_progress_bar()
        model.generation_config = GenerationConfig(pad_token_id=0)
        return model.to(self._device).eval()

    def _encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, as from `LLM.encode`."""
        if not prompt:
            raise RequestError("the prompt is empty: pass text, token ids or chat messages")
        return encode(self._tokenizer, prompt)

    def _generate(self, prompts: Seq[list[int]], asked: RequestSettings) -> list[Answer]:
        stops = () if asked.ignore_eos else self._stop_token_ids
        options: dict[str, Any] = {"do_sample": False}
        if asked.temperature > 0:
            options = {"do_sample": True, "temperature": asked.temperature, "top_k": 0}
            torch.manual_seed(asked.seed)
        if asked.ignore_eos:
            options["min_new_tokens"] = asked.max_new_tokens
        streamer = _TimedStreamer(len(prompts))
        began = time.perf_counter()
        longest = max(map(len, prompts))
        rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._model.generate(
            torch.tensor(rows, device=self._device),
            attention_mask=torch.tensor(masks, device=self._device),
            max_new_tokens=asked.max_new_tokens,
            eos_token_id=list(stops) or None,
            assistant_model=self._draft,
            streamer=streamer,
            **options,
        )
        return [self._answer(began, prompt, streamer.row(i, stops)) for i, prompt in enumerate(prompts)]

    def _answer(self, began: float, prompt: list[int], came: Seq[tuple[float, list[int]]]) -> Answer:
        ids = [token for _, tokens in came for token in tokens]
        text = self._tokenizer.decode(ids) if self._tokenizer.available else ""
        return Answer(began, len(prompt), text, [(when, len(tokens)) for when, tokens in came], ids)


def check(model: str, draft: str | None, batch: int = 1) -> None:
    """Raises what keeps transformers from answering with this model and draft."""
    checkpoint = files_of(model)
    if draft is None:
        return
    _check_batch(batch)
    small = files_of(draft, "draft")
    sizes = checkpoint.config.vocab_size, small.config.vocab_size
    difference = checkpoint.tokenizer().difference(small.tokenizer())
    if sizes[0] != sizes[1]:
        difference = f"{sizes[1]} tokens there, {sizes[0]} here"
    if difference is not None:
        raise ConfigError(
            f"draft={small.path}: for transformers it must have the model's tokens ({difference}); use another "
            "draft, or none"
        )


def _check_batch(batch: int) -> None:
    if batch > 1:
        raise ConfigError(
            f"batch={batch}: assisted generation of transformers answers one request at a time; "
            "use batch=1, or leave the draft out"
        )


class _TimedStreamer:
    """A streamer that stores tokens with their times. The tokens are on the CPU: a GPU has computed them."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._steps: list[tuple[float, torch.Tensor]] = []  # the first of them is the prompts

    def put(self, value: torch.Tensor) -> None:
        self._steps.append((time.perf_counter(), value))

    def end(self) -> None:
        """Nothing to do: `put` has stored all steps."""

    def row(self, index: int, stops: Seq[int]) -> list[tuple[float, list[int]]]:
        """Times and tokens of one request, up to its stop token; padding follows it."""
        came = []
        for when, tokens in self._steps[1:]:
            new = tokens.reshape(self._rows, -1)[index].tolist()
            came.append((when, new))
            if set(new) & set(stops):
                break
        return came


def files_of(model: str, field: str = "model") -> Checkpoint:
    """Opens a model that other programs can load as well (no grafts)."""
    if model.startswith(GRAFT_PREFIX):
        base, _, shape = model.removeprefix(GRAFT_PREFIX).rpartition("@")
        raise ConfigError(
            f"{field}={model!r}: only ssd makes grafts as it loads them; write it out with "
            f"`ssd graft {base} --shape {shape.replace(':', ' --quantization ')}` and pass that directory"
        )
    return open_checkpoint(model, field)
