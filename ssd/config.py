"""Options of an engine: frozen and validated, built by the same code from keywords, the command line or JSON.

Knows nothing of how they are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from ssd.errors import ConfigError
from ssd.options import build, described, is_int, option, plain, validate

SUFFIX = "suffix"
MTP = "mtp"
K_DEFAULT = 4  # draft tokens per round
K_SUFFIX = 16  # the same of suffix look-up, whose drafts are shorter where it is not sure
K_MAX = 8  # largest k of k="auto", unless k_max says otherwise
BUDGETS = (8, 16, 32)  # choices of budget="auto"
MOST_BRANCHES = 64  # of budget="auto" for a draft in a process of its own beside a GPU
MAX_FAN_OUT = 16  # branches per draft position
TREE_MAX = 32  # nodes of the largest tree of tree="auto"
# Rows of a batch with trees of tree="auto": with more the target is not bound by reading its weights. Also those of
# the largest graph of a batch with trees.
MOST_TREE_ROWS = 512
_OF_SSD = {
    *("fan_out", "fan_out_hit", "fan_out_miss", "budget", "backup", "placement"),
    *("draft_device", "draft_replicas", "draft_threads", "draft_url", "draft_token"),
}
_OF_A_DRAFT_SERVER = {"k", "k_max", "budget", "backup", "draft_url", "draft_token"}
_ADDRESS = r"(unix:[^,\s]+|tcp://[^,\s/]+:\d{1,5})"


@runtime_checkable
class Proposer(Protocol):
    """A drafter of your own: `LLM(model, speculation={"draft": MyProposer()})`.

    Called once a round, on the engine's thread, after every earlier round is committed. The target verifies what it
    proposes, so that costs or gains speed and changes no token: proposals are cut to `k` tokens and at the first one
    outside of the vocabulary. After an exception, or a result of another type, decoding goes on without drafts for a
    while. There is no time limit: the engine waits for it.
    """

    def propose(self, sequences: Seq[list[int]], k: int) -> Seq[Seq[int]]:
        """For each sequence, given as its token ids so far (prompt and output): up to `k` ids that may come next."""


@dataclass(frozen=True)
class SpeculationConfig:
    """Options of speculative decoding.

    `ar`: autoregressive decoding without drafts. `sd`: `draft` proposes `k` tokens per round while the target waits.
    `ssd`: while the target verifies, the draft model prepares the next draft for each likely outcome. `auto`: the
    fastest of the three.
    """

    mode: Literal["ar", "sd", "ssd", "auto"] = option(
        "ar",
        "ar: no drafts. sd: the draft model proposes tokens while the target waits. ssd: while the target verifies, "
        "the draft model prepares the next draft for every likely outcome. auto: the fastest of them, by measured "
        "speed.",
        hints={
            **dict.fromkeys((SUFFIX, "ngram"), f"suffix look-up is mode='sd' with draft={SUFFIX!r}"),
            MTP: f"the MTP head in the model's checkpoint is a draft: mode='sd' or 'ssd' with draft={MTP!r}",
            **dict.fromkeys(("eagle", "eagle3"), "an EAGLE-3 head is a draft: mode='sd' or 'ssd' with draft=HEAD"),
            "draft_model": "a draft model is named by draft: mode='sd' or 'ssd' with draft=MODEL",
        },
    )
    draft: str | Proposer | None = option(
        None,
        "A small model with the same tokenizer, an EAGLE-3 head or MTP head of the model, 'mtp': the MTP head in the "
        "model's own checkpoint, (not ssd) a block draft of it, DFlash or DSpark, or (not ssd) 'suffix': suffix "
        "look-up, which needs no model.",
        expects=f"a model, {SUFFIX!r}, or an object with a method propose(sequences, k)",
    )
    k: int | Literal["auto"] | None = option(
        None,
        f"Draft tokens per round. None: {K_DEFAULT}; all that a block draft was trained to write; {K_SUFFIX} of suffix "
        "look-up. auto: chosen by measured speed, at most k_max.",
        least=1,
        most=64,
    )
    k_max: int | None = option(
        None,
        f"k auto: the most draft tokens per round. None: {K_MAX}; all that a block draft was trained to write.",
        least=1,
        most=64,
    )
    tree: int | Literal["auto"] | None = option(
        None,
        "sd with a learned draft, ssd with a draft model on the target's device: nodes of the draft tree of a "
        f"sequence, whose paths have up to k tokens. None: a chain of k tokens. auto (sd): a tree of up to {TREE_MAX} "
        "nodes, a chain or plain decoding, chosen by measured speed for each batch size.",
        least=2,
        most=64,
    )
    suffix: bool = option(
        False,
        "sd, auto: suffix look-up beside the draft model or head. For each sequence the draft is verified that is "
        "expected to have more tokens accepted. auto: the fastest of no drafts, look-up alone, and both.",
    )
    suffix_cache_tokens: int = option(
        0,
        "Suffix look-up finds drafts in earlier answers of the engine, too, of all users: the last ones with so many "
        "tokens together. It takes up to 172 bytes a token.",
        least=0,
        most=1 << 28,
    )
    draft_quantization: Literal["none", "fp8", "int8", "int4", "int8+bf16", "dequantized"] | None = option(
        None,
        "Weights of the draft model in 8 or 4 bits: drafts are faster, and slightly fewer tokens are accepted. "
        "int8+bf16: both are in memory, and steps of more than 32 rows take the latter. None: that, for a large draft "
        "of ssd on the target's GPU, where both read memory at the same time; int4, for one on the CPU beside a GPU. "
        "dequantized: a quantised checkpoint becomes floats, as a small one on a GPU does where nothing is asked for.",
    )
    acceptance: Literal["coupled", "rejection"] = option(
        "coupled",
        "How draft tokens are accepted. coupled: the text is that of plain decoding. rejection: another sample of the "
        "same distribution.",
    )
    saguaro_c: float = option(
        1.0,
        "acceptance rejection: factor on the draft's most likely tokens. Below 1: more hits, fewer accepted tokens.",
        least=0,
        most=1,
    )
    fan_out: int | Literal["adaptive", "geometric"] = option(
        "adaptive",
        "ssd: which outcomes are prepared. A number: branches per draft position.",
        least=1,
        most=MAX_FAN_OUT,
    )
    fan_out_hit: Seq[int] | None = option(
        None, "ssd: branches after 0, 1, …, k accepted tokens, for drafts that were hits. Needs fan_out_miss."
    )
    fan_out_miss: Seq[int] | None = option(None, "ssd: the same for drafts that were misses. Needs fan_out_hit.")
    budget: int | Literal["auto"] = option(
        16,
        "ssd: branches per sequence, at most. auto: chosen by measured speed; of a draft in its own process beside a "
        "GPU, as many as it prepares during a verification.",
        least=1,
        most=256,
    )
    backup: Literal["jit", "fast", "auto"] = option(
        "auto",
        "ssd: the draft after a miss. jit: the draft model writes one while the target waits. fast: the draft of a "
        "sibling branch, without waiting. auto: whichever is faster.",
    )
    placement: Literal["auto", "inline", "stream", "process"] = option(
        "auto",
        "ssd: where the draft model runs. process: on a core or GPU of its own. stream: on the target's GPU, "
        "concurrently. inline: in turns with the target, which gains no speed.",
    )
    draft_device: str | None = option(
        None,
        "ssd: device of a draft model in a process of its own: cpu, or a GPU such as cuda:1. None: the next GPU, or a "
        "core of the CPU.",
        pattern=r"cpu|cuda:\d{1,3}",
        expects="cpu, or a GPU such as cuda:1",
    )
    draft_replicas: int = option(
        1,
        "ssd, placement process: number of draft models. Each has a core or GPU of its own and prepares `budget` "
        "branches.",
        least=1,
        most=4,
    )
    draft_threads: int | None = option(
        None,
        "ssd, placement process on a CPU: threads of each draft model, on cores of their own. Chosen by measured times "
        "if left out.",
        least=1,
    )
    draft_tensor_parallel_size: int = option(
        1, "ssd, placement process: GPUs (or processes on a CPU) that each draft model is split over.", least=1
    )

    draft_url: str | None = option(
        None,
        "ssd: a draft server (`ssd draft-server`) in place of a draft model: unix:/path or tcp://host:port. Of "
        "several, separated by commas, the one that answers the soonest is used, and another one when it is lost.",
        pattern=rf"{_ADDRESS}(,{_ADDRESS})*",
        expects="unix:/path or tcp://host:port, several of them separated by commas",
    )
    draft_token: str | None = option(
        None,
        "The token that the draft server asks for; engines with the same one share prefixes there.",
        env="SSD_DRAFT_TOKEN",
    )

    def __post_init__(self) -> None:
        validate(self, owner="speculation ")
        self._check_fan_out_lists()
        self._check_together()

    def _check_fan_out_lists(self) -> None:
        for name in ("fan_out_hit", "fan_out_miss"):
            value = getattr(self, name)
            if value is None:
                continue
            counts = tuple(map(plain, value)) if isinstance(value, (list, tuple)) else ()
            right = all(is_int(count) and 0 <= count <= MAX_FAN_OUT for count in counts) and any(counts)
            if not right or self.k == "auto" or len(counts) != self.lookahead + 1:
                raise ConfigError(
                    f"speculation {name}={value!r}: must be a list of k + 1 numbers from 0 to {MAX_FAN_OUT} (after 0, "
                    "1, …, k accepted tokens), not all of them 0, and k a number"
                )
            object.__setattr__(self, name, counts)
        if (self.fan_out_hit is None) != (self.fan_out_miss is None):
            raise ConfigError("speculation fan_out_hit and fan_out_miss belong together: give both, or neither")

    def _check_together(self) -> None:
        changed = self._changed
        if self.mode == "ar" and changed:
            mode = "ssd" if changed & _OF_SSD else "sd"
            raise ConfigError(
                f'speculation mode="ar" drafts nothing: leave the other options out, or use mode="{mode}" with a draft'
            )
        self._check_draft_server()
        if self.mode != "ar" and self.draft is None and self.draft_url is None:
            raise ConfigError(f'speculation mode="{self.mode}" needs a draft: name a model, or (not ssd) {SUFFIX!r}')
        if self.draft == "ngram":
            raise ConfigError(f'speculation draft="ngram": n-gram look-up is replaced by draft={SUFFIX!r}')
        modelless = self.draft is not None and self.draft_model is None
        plain = self.mode == "sd" or (self.mode == "auto" and (modelless or self.suffix))
        if plain and (ahead := self.options_of_ssd):
            which, other = f'mode="{self.mode}"', ', or use mode="ssd"'
            if modelless or (self.suffix and self.mode == "auto"):
                which, other = f"draft={self.draft!r}" if modelless else "suffix=True", ""
            raise ConfigError(f"speculation {which} has no option {', '.join(ahead)}: leave it out{other}")
        if self.mode == "ssd" and modelless:
            raise ConfigError(
                f'speculation draft={self.draft!r} has nothing to prepare: use mode="sd", or a draft model'
            )
        if modelless and self.draft_quantization is not None:
            raise ConfigError(
                f"speculation draft_quantization is for draft models, not for {self.draft!r}: leave it out"
            )
        if self.suffix and (self.mode not in ("sd", "auto") or modelless):
            raise ConfigError(
                f"speculation suffix is look-up beside a draft model or head: use mode='sd' or 'auto' and name one, or "
                f"draft={SUFFIX!r} for look-up alone"
            )
        if self.suffix_cache_tokens and not (self.suffix or self.draft == SUFFIX):
            raise ConfigError(
                f"speculation suffix_cache_tokens={self.suffix_cache_tokens} is for suffix look-up: leave it out, or "
                f"use draft={SUFFIX!r}"
            )
        if self.draft_device is not None and self.placement not in ("auto", "process"):
            raise ConfigError(
                f'speculation placement="{self.placement}" is on the device of the target: leave draft_device out, or '
                'use placement="process"'
            )
        for name in ("draft_replicas", "draft_tensor_parallel_size"):
            if getattr(self, name) > 1 and self.placement != "process":
                raise ConfigError(
                    f"speculation {name}={getattr(self, name)} is for drafts in processes of their own: use "
                    'placement="process" with mode="ssd" or "auto", or leave it out'
                )
        if self.draft_replicas > 1 and self.acceptance == "rejection":
            raise ConfigError(
                f"speculation draft_replicas={self.draft_replicas}: replicas send no distributions, which "
                'acceptance="rejection" needs; leave one of them out'
            )
        if self.k_max is not None and self.k != "auto":
            raise ConfigError(f'speculation k_max={self.k_max} is for k="auto": leave it out, or use that')
        self._check_tree()
        if self.saguaro_c != 1.0 and self.acceptance != "rejection":
            raise ConfigError('speculation saguaro_c is for acceptance="rejection": leave it out, or use that rule')
        if self.fan_out_hit is not None and self.fan_out != "adaptive":
            raise ConfigError("speculation fan_out and fan_out_hit/fan_out_miss are two ways to say it: leave one out")

    def _check_draft_server(self) -> None:
        url = self.draft_url
        if url is None:
            if self.draft_token is not None:
                raise ConfigError("speculation draft_token is for a draft server: name it with draft_url")
            return
        if self.draft is not None:
            raise ConfigError(
                f"speculation draft_url={url!r} and draft={self.draft!r}: a draft server has a draft model of its own; "
                "heads and block drafts read the target's hidden states, which are not sent. Leave one of them out"
            )
        if self.mode != "ssd":
            raise ConfigError(f'speculation draft_url={url!r} is for mode="ssd", not for mode="{self.mode}"')
        if others := sorted(self._changed - _OF_A_DRAFT_SERVER):
            raise ConfigError(
                f"speculation draft_url={url!r} has no option {', '.join(others)}: the draft server has its own; leave "
                "it out"
            )

    def _check_tree(self) -> None:
        if self.tree is None:
            return
        if self.mode not in ("sd", "ssd"):
            raise ConfigError(
                f'speculation tree={self.tree} is for mode="sd" or "ssd", not for mode="{self.mode}": leave it out'
            )
        if self.acceptance == "rejection":
            raise ConfigError(
                f'speculation tree={self.tree} needs acceptance="coupled", by which a tree has one text: leave it out, '
                "or use that rule"
            )
        if self.k == "auto" or (self.k is not None and self.nodes < self.k):
            raise ConfigError(
                f"speculation tree={self.tree}: k={self.k!r} must be a number of at most {self.nodes}, that of the "
                "longest path"
            )
        if self.draft == SUFFIX or self.suffix:
            raise ConfigError(f"speculation tree={self.tree}: suffix look-up proposes chains; leave one of them out")
        if self.mode == "ssd":
            self._check_prepared_trees()

    def _check_prepared_trees(self) -> None:
        trees = f'speculation tree={self.tree}, mode="ssd"'
        for name in ("tree", "budget"):
            if getattr(self, name) == "auto":
                raise ConfigError(f"{trees}: {name} must be a number")
        if self.placement == "process" or self.draft_device is not None or self.draft_url is not None:
            raise ConfigError(
                f'{trees}: trees are prepared on the device of the target, in its process; use placement="stream" on a '
                'GPU, else "inline", and no draft_device or draft_url'
            )
        if self.fan_out != "adaptive" or self.fan_out_hit is not None:
            raise ConfigError(
                f"{trees}: the likeliest outcomes of a tree are prepared, {self.budget} of them; leave fan_out, "
                "fan_out_hit and fan_out_miss out"
            )

    @property
    def _changed(self) -> set[str]:
        return {f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default} - {"mode"}

    @property
    def options_of_ssd(self) -> list[str]:
        """Names of the options of mode="ssd" that are given."""
        return sorted(self._changed & _OF_SSD)

    @property
    def draft_model(self) -> str | None:
        """The draft model or head; None where tokens are proposed without one."""
        return self.draft if isinstance(self.draft, str) and self.draft != SUFFIX else None

    @property
    def lookahead(self) -> int:
        """Maximum draft length of a round."""
        if self.mode == "ar":
            return 0
        usual = K_SUFFIX if self.draft == SUFFIX else K_DEFAULT
        return self.k_max or K_MAX if self.k == "auto" else self.k or usual

    @property
    def nodes(self) -> int:
        """Nodes of the largest draft tree; 0: drafts are chains."""
        return max(TREE_MAX, self.lookahead) if self.tree == "auto" else self.tree or 0

    @property
    def draft_tokens(self) -> int:
        """Maximum number of draft tokens of a sequence that a round verifies."""
        chain = max(self.lookahead, K_SUFFIX) if self.suffix and self.mode == "auto" else self.lookahead
        return self.nodes or chain

    def most_rows(self, sequences: int) -> int:
        """Maximum number of query tokens of a round in which so many sequences decode."""
        rows = sequences * (1 + self.draft_tokens)
        if self.tree == "auto":
            return max(min(rows, MOST_TREE_ROWS), sequences * (1 + self.lookahead))
        return rows

    @property
    def budgets(self) -> tuple[int, ...]:
        """The possible numbers of branches per sequence."""
        return BUDGETS if self.budget == "auto" else (int(self.budget),)

    @property
    def draft_ranks(self) -> int:
        """The ranks of all draft models in processes of their own: GPUs, or cores of the CPU, that they have."""
        apart = self.placement == "process" or self.draft_device is not None
        return self.draft_replicas * self.draft_tensor_parallel_size if apart else 0

    @property
    def draft_cores(self) -> int:
        """CPU cores of draft models in processes of their own."""
        return self.draft_ranks * (self.draft_threads or 1)

    @classmethod
    def of(cls, value: SpeculationConfig | Mapping[str, Any] | None) -> SpeculationConfig:
        if isinstance(value, SpeculationConfig):
            return value
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise ConfigError(
                f'speculation={value!r}: must be None or a mapping such as {{"mode": "sd", "draft": "…", "k": 4}}'
            )
        implied = {"mode": "ssd"} if "draft_url" in value else {"mode": "sd"} if "draft" in value else {}
        return build(cls, {**implied, **value})


@dataclass(frozen=True)
class EngineConfig:
    """All options of an engine. None: chosen from the model and the device."""

    model: str = field(
        metadata=described(
            "A bundled model, a directory, a .gguf file, a hub id (org/name, org/name:Q4_K_M), or graft:MODEL@SHAPE.",
            expects="a bundled model, a directory, a .gguf file or a hub id",
        )
    )
    device: str = option(
        "auto",
        "auto, cpu, cuda, or one GPU: cuda:1.",
        pattern=r"auto|cpu|cuda(:\d{1,3})?",
        expects="one of auto, cpu, cuda, or a GPU such as cuda:1",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", "Type of weights and activations.")
    quantization: Literal["fp8", "fp8_dynamic", "int8", "int4"] | None = option(
        None,
        "Rounds the weights of the model's layers to 8 or 4 bits when they are loaded: less memory and faster steps, "
        "and another text than that of the unrounded model. fp8_dynamic: activations, too, token by token, which makes "
        "prompts and large batches faster. A quantised checkpoint is run as it is, without this.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = option(
        "auto",
        "Type of the target's KV cache. auto: that of the activations. fp8: 8-bit floats (e4m3), half the memory of "
        "bfloat16; its text differs from that with auto, and is the same in every mode.",
        hints={"fp8_e4m3": "fp8 is e4m3"},
    )
    max_model_len: int | None = option(
        None, "Maximum length of a sequence, prompt and output together, in tokens.", least=1
    )
    max_num_seqs: int = option(64, "Maximum number of sequences decoded at the same time.", least=1)
    max_num_batched_tokens: int | None = option(
        None, "Maximum number of tokens in a batch; longer prefills are chunked.", least=1
    )
    block_size: int | None = option(None, "Tokens of one KV block.", least=1)
    num_kv_blocks: int | None = option(None, "Number of KV blocks.", least=1)
    gpu_memory_utilization: float = option(
        0.9, "Share of the GPU's memory for weights, activations and KV.", above=0, most=1
    )
    tensor_parallel_size: int = option(
        1, "Ranks that the model is split over: GPUs from `device` on, or processes on a CPU.", least=1
    )
    prefix_caching: bool = option(True, "Reuse the KV of prompts that begin with the same tokens.")
    eager: bool = option(False, "No CUDA graphs: starts sooner, decodes slower.")
    trust_request_chat_template: bool = option(False, "Allow requests to bring a chat template of their own.")
    speculation: SpeculationConfig = field(
        default_factory=SpeculationConfig,
        metadata=described(
            """All options of speculation as JSON, or @FILE: '{"mode": "ssd", "draft": "tiny-llama-draft", "k": 4}'."""
        ),
    )

    def __post_init__(self) -> None:
        validate(self)
        object.__setattr__(self, "speculation", SpeculationConfig.of(self.speculation))
        if self.speculation.tree is not None and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"speculation tree={self.speculation.tree} is for models that are not split, not for "
                f"tensor_parallel_size={self.tensor_parallel_size}: leave one of them out"
            )
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "every decoding sequence needs a token a round; raise the former or lower the latter"
            )

    @property
    def kv_dtype(self) -> str:
        """What the model's KV cache is stored in."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
