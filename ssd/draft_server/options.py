"""Options of a draft server. Those of its model are fields of `EngineConfig` and `SpeculationConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ssd.config import EngineConfig, SpeculationConfig
from ssd.errors import ConfigError
from ssd.options import option, validate
from ssd.parallel.address import Address


@dataclass(frozen=True)
class DraftServerOptions:
    """Where a draft server listens, whom it serves, and how much each engine may have."""

    listen: tuple[str, ...] = option(
        ("unix:ssd-draft.sock",),
        "Addresses, separated by commas: unix:/path for engines of this user on this host, tcp://host:port for others, "
        "which needs tokens. There is no encryption: beyond loopback let a proxy do TLS.",
        listed=True,
    )
    tokens: tuple[str, ...] = option(
        (),
        "Serve only engines with one of these tokens, separated by commas. Engines with the same token share prefixes.",
        env="SSD_DRAFT_TOKEN",
        listed=True,
    )
    http_host: str = option("127.0.0.1", "Address of /health, /ready and /metrics.")
    http_port: int | None = option(
        None, "Port of /health, /ready and /metrics. None: they are not served.", least=0, most=65535
    )
    max_engines: int = option(8, "Engines at the same time; others are refused.", least=1, most=256)
    max_sequences: int = option(64, "Sequences of an engine at the same time, at most.", least=1)
    k: int = option(8, "Draft tokens of a round, at most.", least=1, most=64)
    budget: int = option(32, "Branches that are prepared for a sequence, at most.", least=1, most=256)
    max_model_len: int | None = option(
        None, "Tokens of a sequence, at most. None: the positions of the draft model.", least=1
    )
    device: str = option(
        "auto",
        "auto, cpu, cuda, or one GPU: cuda:1.",
        pattern=r"auto|cpu|cuda(:\d{1,3})?",
        expects="auto, cpu or cuda:1",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", "Type of weights and activations.")
    draft_quantization: Literal["none", "fp8", "int8", "int4"] | None = option(
        None, "Weights in 8 or 4 bits: drafts are faster, and slightly fewer tokens are accepted."
    )
    threads: int = option(1, "Threads on a CPU.", least=1)
    num_kv_blocks: int | None = option(None, "KV blocks of all engines together. None: what fits.", least=1)

    def __post_init__(self) -> None:
        validate(self)
        if not self.listen:
            raise ConfigError("listen: must have an address, such as unix:/run/ssd-draft.sock or tcp://127.0.0.1:8100")
        if any(not address.path for address in self.addresses) and not self.tokens:
            raise ConfigError(
                f"listen={','.join(self.listen)!r}: engines that come over TCP need a token: set SSD_DRAFT_TOKEN, or "
                "listen on unix:/path"
            )

    @property
    def addresses(self) -> list[Address]:
        return [Address.of(each) for each in self.listen]

    def config(self, draft: str) -> EngineConfig:
        """That of the draft model; `max_num_seqs`, k and budget are what one engine may have."""
        return EngineConfig(
            draft,
            device=self.device,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_sequences,
            num_kv_blocks=self.num_kv_blocks,
            speculation=SpeculationConfig(
                mode="ssd",
                draft=draft,
                k=self.k,
                budget=self.budget,
                placement="process",
                draft_quantization=self.draft_quantization,
                draft_threads=self.threads,
            ),
        )
