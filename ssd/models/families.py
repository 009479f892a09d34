"""The model families: how each one's `config.json` is translated into a `DecoderConfig`.

A family is one short function; the decoder itself is the same for all. Input is the plain JSON dictionary, in the
spelling of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) or 5 (`rope_parameters`, `dtype`).
Knows nothing of files, weights, tokenizers or devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Final

from ssd.errors import UnsupportedModel
from ssd.kernels.weights import GLU, RoutingRule
from ssd.layers.spec import ExpertNames, ExpertsSpec, LatentSpec, RopeConfig
from ssd.models.config import DecoderConfig, equal_layers
from ssd.models.fields import (
    EPSILON,
    EXPERTS,
    FACTOR,
    FLAG,
    HEAD_DIM,
    HEADS,
    LAYERS,
    LIST,
    OBJECT,
    POSITIONS,
    TEXT,
    THETA,
    VOCABULARY,
    WIDTH,
    Field,
    check_field,
    check_fields,
    check_shape,
    number,
    shown,
)

Raw = Mapping[str, Any]
BLOCK_DRAFT, EAGLE_HEAD, MTP_HEAD = "a block draft", "an EAGLE head", "an MTP head"  # in messages
DTYPES: Final = ("bfloat16", "float16", "float32")
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
_WHERE: Final = "config.json"
_ROPE: Final = f"the rope scaling of {_WHERE}"
_FIELDS: Final[Mapping[str, Field]] = {
    "architectures": LIST,
    "model_type": TEXT,
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "norm_topk_prob": FLAG,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": Field("an integer", (int,), 0, 1 << 8),
    "first_k_dense_replace": Field("an integer", (int,), 0, 1 << 16),
    "mlp_layer_types": LIST,
    "n_group": EXPERTS,
    "topk_group": EXPERTS,
    "routed_scaling_factor": FACTOR,
    "kv_lora_rank": HEAD_DIM,
    "q_lora_rank": WIDTH,
    "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM,
    "experts_per_token": EXPERTS,
    "swiglu_alpha": FACTOR,
    "swiglu_limit": FACTOR,
    "decoder_sparse_step": LAYERS,
    "mlp_only_layers": LIST,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": Field("an integer", (int,), 0, 1 << 10),
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": POSITIONS,
    "original_max_position_embeddings": POSITIONS,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
    "quantization_config": OBJECT,
    "compression_config": OBJECT,
    "ssd_graft": OBJECT,
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "use_sliding_window": FLAG,
    "sliding_window": Field("an integer", (int,), 0, 1 << 23),
    "max_window_layers": Field("an integer", (int,)),
    "layer_types": LIST,
    "hidden_act": TEXT,
    "dtype": TEXT,
    "torch_dtype": TEXT,
}
_ROPE_FIELDS: Final[Mapping[str, Field]] = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": THETA,
    "factor": FACTOR,
    "low_freq_factor": FACTOR,
    "high_freq_factor": FACTOR,
    "beta_fast": FACTOR,
    "beta_slow": FACTOR,
    "attention_factor": FACTOR,
    "mscale": number(0.0, 1e6),
    "mscale_all_dim": number(0.0, 1e6),
    "original_max_position_embeddings": POSITIONS,
    "truncate": FLAG,
}


def llama(raw: Raw) -> DecoderConfig:
    """Llama 2 to 3.3, TinyLlama, SmolLM2: optional biases, none by default."""
    bias = bool(raw.get("attention_bias", False))
    return _decoder(
        raw, "llama", max_position=2048, qkv_bias=bias, output_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False))
    )


def mistral(raw: Raw) -> DecoderConfig:
    """Mistral: Llama under another name, with a sliding window before 7B v0.2."""
    windows = [raw.get("sliding_window", 4096)] * _size(raw, "num_hidden_layers")
    return _decoder(raw, "mistral", max_position=131072, kv_heads=8, windows=windows)


def qwen2(raw: Raw) -> DecoderConfig:
    """Qwen 2 and 2.5: biases on q, k and v, and nowhere else."""
    return _decoder(raw, "qwen2", max_position=32768, kv_heads=32, qkv_bias=True, windows=_qwen_windows(raw))


def qwen3(raw: Raw) -> DecoderConfig:
    """Qwen 3: norms on q and k, and a head size of its own."""
    bias = bool(raw.get("attention_bias", False))
    return _decoder(
        raw,
        "qwen3",
        max_position=32768,
        kv_heads=32,
        head_dim=128,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        windows=_qwen_windows(raw),
    )


def gpt_oss(raw: Raw) -> DecoderConfig:
    """GPT-OSS: sinks, biases everywhere, a sliding window in every other layer from the first on, and experts."""
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or yarn
    chosen = raw.get("experts_per_token", 4)  # another name of it, in published files
    raw = {"rope_theta": 150000.0, "rms_norm_eps": 1e-5, "num_experts_per_tok": chosen, **raw}
    raw |= {"rope_parameters": given, "rope_scaling": None}
    count, bias = _size(raw, "num_hidden_layers"), bool(raw.get("attention_bias", True))
    types = raw.get("layer_types") or [("sliding_attention", "full_attention")[i % 2] for i in range(count)]
    config = _decoder(
        raw,
        "gpt_oss",
        max_position=131072,
        kv_heads=8,
        head_dim=64,
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        windows=typed_windows(types, count, raw.get("sliding_window", 128)),
    )
    alpha, limit = (raw.get(name) for name in ("swiglu_alpha", "swiglu_limit"))
    glu = GLU(1.702 if alpha is None else alpha, 7.0 if limit is None else limit, 1.0)
    names, sizes = ExpertNames(router="router"), (128, 4, _size(raw, "intermediate_size"))
    config = _with_experts(raw, config, range(count), sizes, bias=True, glu=glu, names=names, interleaved=True)
    return replace(config, float32_norms=True)


def qwen3_moe(raw: Raw) -> DecoderConfig:
    """Qwen 3 with experts, except in the layers that `mlp_only_layers` and `decoder_sparse_step` leave dense."""
    bias, layers = bool(raw.get("attention_bias", False)), _size(raw, "num_hidden_layers")
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    config = _decoder(
        raw,
        "qwen3_moe",
        max_position=32768,
        kv_heads=4,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        windows=[window] * layers,
    )
    step, dense = _size(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    sparse = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]
    size, over_chosen = _size(raw, "moe_intermediate_size", 768), bool(raw.get("norm_topk_prob", False))
    return _with_experts(raw, config, sparse, (128, 8, size), rule=RoutingRule(over_chosen))


def mixtral(raw: Raw) -> DecoderConfig:
    """Mixtral: Mistral with experts in every layer."""
    layers = _size(raw, "num_hidden_layers")
    raw = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, **raw}
    windows = [raw.get("sliding_window")] * layers
    config = _decoder(raw, "mixtral", max_position=131072, kv_heads=8, windows=windows)
    names = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
    return _with_experts(raw, config, range(layers), (8, 2, _size(raw, "intermediate_size")), names=names)


def _with_experts(
    raw: Raw, config: DecoderConfig, sparse: Iterable[int], sizes: tuple[int, int, int], **options: Any
) -> DecoderConfig:
    """Experts in the layers `sparse`. `sizes`: the family's own number of experts, and of those of a token, and the
    inner size of each; `options`: further fields of `ExpertsSpec`."""
    count, chosen, size = sizes
    count = _size(raw, "num_experts" if raw.get("num_experts") is not None else "num_local_experts", count)
    chosen = _size(raw, "num_experts_per_tok", chosen)
    if chosen > count:
        raise UnsupportedModel(f"num_experts_per_tok={chosen}: expected up to the number of experts, {count}")
    experts, sparse = ExpertsSpec(count, chosen, size, **options), set(sparse)
    layers = (replace(layer, mlp=experts) if i in sparse else layer for i, layer in enumerate(config.layers))
    return replace(config, layers=tuple(layers))


def glm4_moe_lite(raw: Raw) -> DecoderConfig:
    """GLM-4.7-Flash: DeepSeek-V3 in small."""
    types, count = raw.get("mlp_layer_types"), _size(raw, "num_hidden_layers")
    dense = _size(raw, "first_k_dense_replace", 1)
    if types is not None:
        dense = list(types).index("sparse") if "sparse" in types else count
        if types != ["dense"] * dense + ["sparse"] * (count - dense):
            raise UnsupportedModel(
                f"mlp_layer_types={shown(types)}: expected {count} entries, dense ones and then sparse ones"
            )
    return _latent(raw, "glm4_moe_lite", max_position=202752, dense=dense)


def deepseek_v3(raw: Raw) -> DecoderConfig:
    """DeepSeek-V3 and R1, Kimi K2, Moonlight: latent attention, experts in groups."""
    return _latent(raw, "deepseek_v3", max_position=4096, dense=_size(raw, "first_k_dense_replace", 3))


def kimi_k25(raw: Raw) -> DecoderConfig:
    """Kimi K2.5: the text model of K2 beside a vision model, whose tensors are not read."""
    return replace(deepseek_v3(raw), family="kimi_k25", tensor_prefix="language_model.")


def _latent(raw: Raw, family: str, *, max_position: int, dense: int) -> DecoderConfig:
    """Latent attention, and from layer `dense` on DeepSeek-V3's router and shared experts."""
    fixed = {
        "rope_interleave": (True, "neighbours are rotated together (true)"),
        "attention_bias": (False, "no biases (false)"),
        "scoring_func": ("sigmoid", "sigmoid"),
        "topk_method": ("noaux_tc", "noaux_tc"),
        "moe_layer_freq": (1, "experts in every layer after the dense ones (1)"),
        "num_key_value_heads": (_size(raw, "num_attention_heads"), "as many as num_attention_heads"),
    }
    for key, (expected, meaning) in fixed.items():
        if raw.get(key) not in (None, expected):
            raise UnsupportedModel(f"{key}={shown(raw[key])}: ssd runs {family} with {meaning}")
    if "q_lora_rank" not in raw:
        raise UnsupportedModel("q_lora_rank is missing from config.json: expected a number, or null for one projection")
    key_dim, rope_dim = _size(raw, "qk_nope_head_dim"), _size(raw, "qk_rope_head_dim")
    if raw.get("qk_head_dim") not in (None, key_dim + rope_dim):
        raise UnsupportedModel(
            f"qk_head_dim={raw['qk_head_dim']}: expected qk_nope_head_dim={key_dim} + qk_rope_head_dim={rope_dim}"
        )
    around = _decoder({**raw, "num_key_value_heads": None, "head_dim": rope_dim}, family, max_position=max_position)
    rope = around.attention.rope
    attention = LatentSpec(
        num_heads=around.attention.num_heads,
        latent_dim=_size(raw, "kv_lora_rank"),
        key_dim=key_dim,
        rope_dim=rope_dim,
        value_dim=_size(raw, "v_head_dim"),
        rope=rope,
        softmax_scale=(key_dim + rope_dim) ** -0.5 * _latent_softmax_factor(raw, rope),
        query_rank=raw["q_lora_rank"],
    )
    layers = (replace(around.layer, attention=attention),) * around.num_layers
    config = replace(around, layers=layers)
    if dense >= config.num_layers:
        return config
    inner, count = _size(raw, "moe_intermediate_size"), _size(raw, "n_routed_experts")
    return _with_experts(
        {**raw, "num_experts": count},
        config,
        range(dense, config.num_layers),
        (count, _size(raw, "num_experts_per_tok"), inner),
        rule=_sigmoid_rule(raw, count),
        shared_size=inner * _size(raw, "n_shared_experts", 0),
    )


def _sigmoid_rule(raw: Raw, num_experts: int) -> RoutingRule:
    groups, kept = _size(raw, "n_group", 1), _size(raw, "topk_group", 1)
    chosen = _size(raw, "num_experts_per_tok")
    if num_experts % groups or (groups > 1 and num_experts // groups < 2):
        raise UnsupportedModel(f"n_group={groups}: expected groups of two or more of n_routed_experts={num_experts}")
    if kept > groups or chosen > kept * num_experts // groups:
        raise UnsupportedModel(
            f"topk_group={kept}: expected up to n_group={groups}, with num_experts_per_tok={chosen} experts or more"
        )
    normalized, scale = raw.get("norm_topk_prob") is not False, raw.get("routed_scaling_factor")
    return RoutingRule(normalized, True, groups, kept, 1.0 if scale is None else float(scale))


def _latent_softmax_factor(raw: Raw, rope: RopeConfig) -> float:
    """YaRN also stretches the softmax scale of latent attention, by `mscale_all_dim`."""
    params = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    scale = float(params.get("mscale_all_dim") or 0.0)
    return (0.1 * scale * math.log(rope.factor) + 1.0) ** 2 if rope.scaling == "yarn" and rope.factor > 1 else 1.0


Family = Callable[[Raw], DecoderConfig]
FAMILIES: Final[Mapping[str, Family]] = {  # by architecture; the functions' names are the values of `model_type`
    "DeepseekV3ForCausalLM": deepseek_v3,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite,
    "GptOssForCausalLM": gpt_oss,
    "KimiK25ForConditionalGeneration": kimi_k25,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}


_SPARSE: Final = ("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GlmMoeDsaForCausalLM")


def text_config(raw: Raw) -> Raw:
    """A config.json, with the fields of its text model if that is one of several."""
    nested = raw.get("text_config")
    check_field("text_config", nested, OBJECT, _WHERE)
    if not nested:
        return raw
    around = {key: value for key, value in raw.items() if key != "text_config" and value is not None}
    return {**around, **nested, "architectures": raw.get("architectures"), "model_type": raw.get("model_type")}


def decoder_config(raw: Raw) -> DecoderConfig:
    """Translate a parsed `config.json`; UnsupportedModel names the value that is not supported."""
    raw = text_config(raw)
    check_fields(raw, _FIELDS, _WHERE)
    name = _architecture(raw)
    family = FAMILIES.get(name)
    if (kind := draft_kind(raw)) is not None:
        raise UnsupportedModel(
            f"architectures={shown(name)}: {kind} is no model, it drafts for one: load its model, with "
            'speculation={"mode": "sd", "draft": DRAFT} (on the command line --draft DRAFT)'
        )
    if name in _SPARSE:
        raise UnsupportedModel(f"architectures={shown(name)}: ssd has no sparse attention; use DeepSeek-V3")
    if family is None:
        raise UnsupportedModel(f"architectures={shown(name)}: ssd runs {', '.join(FAMILIES)}")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act={shown(activation)}: ssd supports silu")
    config = family(raw)
    check_shape(config)
    return config


def draft_kind(raw: Raw) -> str | None:
    """What a config.json is of, if that is no model but a draft on the features of one: a head, of any version."""
    names = _kind_names(raw)
    if block_kind(raw) is not None:
        return BLOCK_DRAFT
    if "mtp" in names or "nextn" in names:
        return MTP_HEAD
    return EAGLE_HEAD if "draft_vocab_size" in raw or "eagle" in names else None


def block_kind(raw: Raw) -> str | None:
    """dflash, dflash2 or dspark, if a config.json is that of a block draft."""
    names = _kind_names(raw)
    return next((kind for kind in ("dflash2", "dflash", "dspark") if kind in names), None)


def _kind_names(raw: Raw) -> str:
    return f"{raw.get('speculators_model_type')} {raw.get('architectures')}".lower()


def _architecture(raw: Raw) -> str:
    """The first name under `architectures`; configs saved by hand may have `model_type` only."""
    architectures = raw.get("architectures")
    if architectures:
        return str(architectures[0])
    model_type = str(raw.get("model_type"))
    model_type = "deepseek_v3" if model_type == "kimi_k2" else model_type
    return next((name for name, family in FAMILIES.items() if family.__name__ == model_type), model_type)


def _decoder(
    raw: Raw,
    family: str,
    *,
    max_position: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    windows: Seq[int | None] = (),
    **switches: bool,
) -> DecoderConfig:
    """What all families share. The keywords are the family's own defaults (None: derived); `windows`: of each layer,
    where a family has any; `switches`: biases, norms and sinks, as in `equal_layers`."""
    heads, hidden = _size(raw, "num_attention_heads"), _size(raw, "hidden_size")
    max_position = _size(raw, "max_position_embeddings", max_position)
    rope = rope_config(raw, max_position)
    if rope.scaling == "yarn":  # published configs state the length before stretching
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    config = equal_layers(
        family=family,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_size({"num_key_value_heads": kv_heads, **raw}, "num_key_value_heads", heads),
        head_dim=_size({"head_dim": head_dim, **raw}, "head_dim", hidden // heads),
        max_position=max_position,
        rms_eps=float(raw.get("rms_norm_eps") or 1e-6),
        rope=rope,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=_dtype(raw),
        **switches,
    )
    if not any(windows):
        return config
    attention = [replace(config.attention, window=window or None) for window in windows]
    return replace(config, layers=tuple(replace(config.layer, attention=each) for each in attention))


def _size(raw: Raw, key: str, default: int | None = None) -> int:
    """A missing or null one takes the default, or is an error when there is none."""
    value: int | None = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise UnsupportedModel(f"{key} is missing from config.json: the checkpoint is incomplete; download it again")
    return value


def _dtype(raw: Raw) -> str:
    """`dtype` (transformers 5) or `torch_dtype` (4)."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or DecoderConfig.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype={shown(name)}: ssd loads {', '.join(DTYPES)}")
    return name


def _qwen_windows(raw: Raw) -> list[int | None]:
    """The sliding window of each layer, None for the whole context: by `layer_types`, else by `max_window_layers`."""
    count, window = _size(raw, "num_hidden_layers"), raw.get("sliding_window", 4096)
    types, window = raw.get("layer_types"), window if raw.get("use_sliding_window") else None
    if types is None:
        full = 28 if raw.get("max_window_layers") is None else raw["max_window_layers"]
        return [window if i >= full else None for i in range(count)]
    return typed_windows(types, count, window)


def typed_windows(types: Seq[object], count: int, window: int | None) -> list[int | None]:
    """The sliding window of each of `count` layers by its type."""
    known: dict[object, int | None] = {"full_attention": None, "sliding_attention": window}
    for kind in types:
        if not isinstance(kind, str) or kind not in known:
            raise UnsupportedModel(f"layer type {shown(kind)}: ssd knows {', '.join(map(str, known))}")
    if "sliding_attention" in types and not window:
        raise UnsupportedModel("layer_types has sliding_attention, but use_sliding_window or sliding_window is not set")
    if len(types) != count:
        raise UnsupportedModel(f"layer_types has {len(types)} entries, num_hidden_layers is {count}")
    return [known[kind] for kind in types]


def rope_config(raw: Raw, max_position: int) -> RopeConfig:
    """The rotary embedding from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (4)."""
    params = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    check_fields(params, _ROPE_FIELDS, _ROPE)
    kind = params.get("rope_type") or params.get("type")
    if kind is None and params.get("factor") is not None:
        raise UnsupportedModel(f"rope_type is missing from {_ROPE}, which has a factor: name linear, llama3 or yarn")
    kind = kind or "default"
    if kind not in ROPE_TYPES or any(isinstance(value, Mapping) for value in params.values()):
        found = shown(kind) if kind not in ROPE_TYPES else f"one per layer type ({', '.join(params)[:100]})"
        raise UnsupportedModel(f"rope_type {found}: ssd supports {', '.join(ROPE_TYPES)}, the same in every layer")
    partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor={shown(partial)}: ssd rotates whole heads (1.0)")
    stated = raw.get("original_max_position_embeddings") or params.get("original_max_position_embeddings")
    original = int(stated or max_position)
    theta = float(params.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "yarn" and params.get("factor") is None and stated:  # derived, as by transformers
        params["factor"] = max_position / original
    factor = _needed(params, "factor", kind)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind == "llama3":
        low, high = (_needed(params, key, kind) for key in ("low_freq_factor", "high_freq_factor"))
        return RopeConfig(theta, "llama3", factor, low, high, original)
    return _yarn_rope(params, theta, original, factor)


def _yarn_rope(params: Raw, theta: float, original: int, factor: float) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        truncate=params.get("truncate") is not False,
        attention_factor=_yarn_attention(params, factor),
    )


def _yarn_attention(params: Raw, factor: float) -> float | None:
    """The factor as stated, or from `mscale` over `mscale_all_dim`; None leaves it to `factor`."""
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    scale, scale_all = params.get("mscale"), params.get("mscale_all_dim")
    if not (scale and scale_all) or factor <= 1:
        return None
    grow = 0.1 * math.log(factor)
    return (grow * float(scale) + 1.0) / (grow * float(scale_all) + 1.0)


def _needed(params: Raw, key: str, kind: str) -> float:
    if params.get(key) is None:
        other = ", or original_max_position_embeddings, from which it is derived" if kind == "yarn" else ""
        raise UnsupportedModel(f"{key} is missing from {_ROPE}: rope_type {kind} needs a positive number{other}")
    return float(params[key])
