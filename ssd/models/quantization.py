"""`quantization_config` of a checkpoint: which weight format each of its linear layers is stored in.

Knows compressed-tensors, `quant_method: fp8`, GPTQ, AWQ and GPT-OSS's MXFP4, and nothing of files: it gets the names of
the tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Final, cast

from ssd.errors import UnsupportedModel
from ssd.layers.formats import DENSE, FormatOf, WeightFormat, dense
from ssd.layers.formats.awq import AWQ
from ssd.layers.formats.coded import Activations
from ssd.layers.formats.compressed_tensors import PackedRows
from ssd.layers.formats.fp8 import Unpacked
from ssd.layers.formats.gptq import GPTQ
from ssd.layers.formats.mxfp4 import GROUP, MXFP4
from ssd.models.fields import FLAG, LIST, OBJECT, TEXT, Field, check_field, check_fields, shown
from ssd.models.patterns import KNOWN, Pattern

Raw = Mapping[str, Any]
Names = Mapping[str, frozenset[str]]  # by layer: the last parts of its tensors' names
_KEY: Final = "quantization_config"
_WHERE: Final = f"{_KEY} of config.json"
_GROUPS: Final = (16, 32, 64, 128)
_MOST_PLACES: Final = 10_000  # of all patterns: a name takes up to 2 microseconds for each
_SIZE: Final = Field("an integer", (int,))
_FIELDS: Final[Mapping[str, Field]] = {
    "quant_method": TEXT,
    "format": TEXT,
    "config_groups": OBJECT,
    "ignore": LIST,
    "modules_to_not_convert": LIST,
    "ignored_layers": LIST,
    "weight_block_size": LIST,
    "dynamic": OBJECT,
    "bits": _SIZE,
    "group_size": _SIZE,
    "desc_act": FLAG,
    "sym": FLAG,
    "zero_point": FLAG,
}
_ARGUMENTS: Final[Mapping[str, Field]] = {
    "num_bits": _SIZE,
    "type": TEXT,
    "strategy": TEXT,
    "group_size": _SIZE,
    "block_structure": LIST,
    "symmetric": FLAG,
    "dynamic": FLAG,
    "actorder": Field("text or false", (str, bool)),
}


_LAYOUTS: Final = {  # formats of compressed-tensors: types and bits of weights
    "pack-quantized": (("int", 4), ("int", 8)),
    "int-quantized": (("int", 8), ("int", 4)),
    "float-quantized": (("float", 8),),
    "naive-quantized": (("int", 8), ("float", 8)),
    "mxfp4-pack-quantized": (("float", 4),),
}


def formats_of(raw: Raw, tensors: Iterable[str]) -> FormatOf:
    """The format of each linear layer of a checkpoint with these tensors; UnsupportedModel for what is not known."""
    check_fields(raw, _FIELDS, _WHERE)
    method = raw.get("quant_method", "compressed-tensors" if "config_groups" in raw else None)
    _check(method in METHODS, "quant_method", method, ", ".join(METHODS))
    names: dict[str, set[str]] = defaultdict(set)
    for tensor in tensors:
        layer, _, own = tensor.rpartition(".")
        names[layer].add(own)
    return METHODS[method](raw, {layer: frozenset(own) for layer, own in names.items()})


def _check(known: bool, field: str, value: object, supported: str) -> None:
    if not known:
        raise UnsupportedModel(
            f"{_KEY}.{field}={shown(value)}: ssd runs {supported}; use another checkpoint of the model, or a GGUF"
        )


def _group(raw: Raw, key: str = "group_size") -> int | None:
    """Weights of one scale; None for a whole output channel."""
    size = raw.get(key)
    check_field(key, size, _SIZE, _WHERE)
    _check(size in (*_GROUPS, -1), key, size, f"{', '.join(map(str, _GROUPS))} and -1")
    return None if size == -1 else size


# --- methods whose files tell which layers are quantised --------------------------------------------------------------


def _as_stored(raw: Raw, names: Names, marker: str, make: Callable[[str], WeightFormat]) -> FormatOf:
    """`make` for layers that have the tensor `marker`; the config's lists of others are there for whoever quantises.

    A list that names a layer in full must be true, and some layer must be quantised.
    """
    listed = [*(raw.get("modules_to_not_convert") or ()), *(raw.get("ignored_layers") or ())]
    wrong = next((name for name, own in names.items() if marker in own and name in listed), None)
    if wrong is not None:
        raise UnsupportedModel(
            f"{_KEY} says that {wrong} is not quantised, but {wrong}.{marker} is stored: correct config.json"
        )
    if not any(marker in own for own in names.values()):
        raise UnsupportedModel(
            f"{_KEY}.quant_method={shown(raw['quant_method'])}, but no layer has a tensor {marker}: remove {_KEY} from "
            "config.json if the weights are not quantised"
        )
    return lambda name: make(name) if marker in names.get(name, ()) else DENSE


def _fp8(raw: Raw, names: Names) -> FormatOf:
    """FP8 with one scale per tensor, or per block of 128 x 128."""
    scheme, block = raw.get("activation_scheme"), raw.get("weight_block_size")
    _check(scheme in ("dynamic", "static"), "activation_scheme", scheme, "dynamic, static")
    _check(raw.get("fmt", "e4m3") == "e4m3", "fmt", raw.get("fmt"), "e4m3")
    powers = raw.get("scale_fmt") is not None
    _check(raw.get("scale_fmt") in (None, "ue8m0"), "scale_fmt", raw.get("scale_fmt"), "ue8m0, or none")
    if block is None:
        _check(not powers, "scale_fmt", raw.get("scale_fmt"), "it with weight_block_size only")
        whole = Unpacked("fp8", None, activations=Activations(static=scheme == "static"))
        return _as_stored(raw, names, "weight_scale", lambda name: whole)
    _check(scheme == "dynamic", "activation_scheme", scheme, "dynamic with weight_block_size")
    rows, columns = _block(block, "weight_block_size")
    activations = Activations(group=columns, powers=powers)
    blocks = Unpacked("fp8", rows, columns, "weight_scale_inv", activations=activations, powers=powers)
    return _as_stored(raw, names, "weight_scale_inv", lambda name: blocks)


def _block(block: Seq[object], key: str) -> tuple[int, int]:
    rows, columns = block if len(block) == 2 else (None, None)
    known = isinstance(rows, int) and 0 < rows <= 1 << 16 and columns in _GROUPS
    _check(known, key, block, f"[rows, columns] with {', '.join(map(str, _GROUPS))} columns")
    return cast(tuple[int, int], (rows, columns))


def _gptq(raw: Raw, names: Names) -> FormatOf:
    stated = raw.get("checkpoint_format", "gptq")
    _check(stated in ("gptq", "gptq_v2"), "checkpoint_format", stated, "gptq, gptq_v2")
    _check(not raw.get("is_marlin_format"), "is_marlin_format", raw.get("is_marlin_format"), "false")
    patterns = _Patterns()
    rules = [  # after "-:" it is a pattern of layers that are not quantised
        (patterns.read(key.removeprefix("+:"), "dynamic"), rule)
        for key, rule in (raw.get("dynamic") or {}).items()
        if not key.startswith("-:")
    ]

    def make(name: str) -> WeightFormat:
        rule = next((rule for pattern, rule in rules if pattern.match(name)), None) or {}
        check_field("dynamic", rule, OBJECT, _WHERE)
        own = {**raw, **rule}
        _check(own.get("bits") in (4, 8), "bits", own.get("bits"), "4, 8")
        integer: Any = "int4" if own["bits"] == 4 else "int8"
        needed = {"g_idx"} if own.get("desc_act") is True else set()
        return GPTQ(integer, _group(own), names.get(name, frozenset()) | needed, zero_bias=int(stated == "gptq"))

    make("")  # refuses the config now
    return _as_stored(raw, names, "qweight", make)


def _awq(raw: Raw, names: Names) -> FormatOf:
    bits, version = raw.get("bits", raw.get("w_bit")), raw.get("version", "gemm")
    _check(bits == 4, "bits", bits, "4")
    _check(str(version).lower() == "gemm", "version", version, "gemm")
    group = _group(raw, "group_size" if "group_size" in raw else "q_group_size")
    return _as_stored(raw, names, "qweight", lambda name: AWQ("int4", group, names[name]))


def _mxfp4(raw: Raw, names: Names) -> FormatOf:
    """Experts of GPT-OSS, stored as tensors of all experts."""
    fused = {layer for layer, own in names.items() if "gate_up_proj_blocks" in own}
    _check(bool(fused), "quant_method", "mxfp4", "MXFP4 with tensors gate_up_proj_blocks")
    return lambda name: MXFP4() if f"{name.rpartition('.experts.')[0]}.experts" in fused else DENSE


# --- compressed-tensors, whose config tells ---------------------------------------------------------------------------


def _compressed_tensors(raw: Raw, names: Names) -> FormatOf:
    """Layers by targets (name, `re:` pattern or class; a name before a class) and `ignore`."""
    status = raw.get("quantization_status", "compressed")
    _check(status == "compressed", "quantization_status", status, "compressed")
    sparsity = raw.get("sparsity_config") or {}
    check_field("sparsity_config", sparsity, OBJECT, _WHERE)
    _check(sparsity.get("format", "dense") == "dense", "sparsity_config.format", sparsity.get("format"), "dense")
    _check(not raw.get("transform_config"), "transform_config", raw.get("transform_config"), "none")
    scheme = raw.get("kv_cache_scheme")
    if (
        isinstance(scheme, dict)
        and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
        and not raw.get("config_groups")
    ):
        return dense  # scales of a KV cache in fp8 were added, and nothing is quantised
    patterns = _Patterns()
    ignored = _matcher(raw.get("ignore") or (), "ignore", patterns)
    groups = [_scheme(raw, key, group, names, patterns) for key, group in (raw.get("config_groups") or {}).items()]
    _check(bool(groups), "config_groups", raw.get("config_groups"), "one or more groups")

    def format_of(name: str) -> WeightFormat:
        if ignored(name, _class_of(name)):
            return DENSE
        for wanted in ((name, ""), ("", _class_of(name))):
            for matches, make in groups:
                if matches(*wanted):
                    return make(name)
        return DENSE

    return format_of


def _class_of(name: str) -> str:
    """Of torch.nn; "" for norms and routers, which no group is for."""
    return "Embedding" if name.endswith("embed_tokens") else "" if name.endswith(("norm", ".gate")) else "Linear"


class _Patterns:
    """Reads the patterns of one config, whose size is limited in all."""

    def __init__(self) -> None:
        self._num_places = 0

    def read(self, text: str, key: str) -> Pattern:
        try:
            pattern = Pattern(text)
        except ValueError as error:
            raise UnsupportedModel(
                f"{_KEY}.{key}={shown(text)} {error}: ssd matches patterns of {KNOWN}; correct config.json, or use "
                "another checkpoint of the model, or a GGUF"
            ) from None
        self._num_places += pattern.num_places
        _check(self._num_places <= _MOST_PLACES, key, text, f"configs whose patterns have {_MOST_PLACES} characters")
        return pattern


def _matcher(targets: Seq[object], key: str, patterns: _Patterns) -> Callable[[str, str], bool]:
    """Whether a layer's name or class is among the targets."""
    for target in targets:
        check_field(key, target, TEXT, _WHERE)
    exact = {str(target) for target in targets}
    read = [patterns.read(target[3:], key) for target in exact if target.startswith("re:")]
    return lambda name, kind: name in exact or kind in exact or any(pattern.match(name) for pattern in read)


def _scheme(
    raw: Raw, key: str, group: object, names: Names, patterns: _Patterns
) -> tuple[Callable[[str, str], bool], Callable[[str], WeightFormat]]:
    """Which layers a config group is for, and their format."""
    key = f"config_groups.{key}"
    _check(isinstance(group, Mapping), key, group, "an object")
    scheme = cast(Raw, group)
    check_fields(scheme, {"targets": LIST, "weights": OBJECT, "input_activations": OBJECT, "format": TEXT}, key)
    targets, weights, inputs = scheme.get("targets") or [], scheme.get("weights") or {}, scheme.get("input_activations")
    _check(bool(targets), f"{key}.targets", targets, "a list of layers")
    _check(bool(weights), f"{key}.weights", weights, "quantised weights")
    outputs = scheme.get("output_activations")
    _check(outputs is None, f"{key}.output_activations", outputs, "none")
    check_fields(weights, _ARGUMENTS, f"{key}.weights")
    make = _layout(scheme.get("format") or raw.get("format"), key, weights, inputs)
    return _matcher(targets, f"{key}.targets", patterns), lambda name: make(names.get(name, frozenset()))


def _layout(form: object, key: str, weights: Raw, inputs: Raw | None) -> Callable[[frozenset[str]], WeightFormat]:
    """The format of layers that are stored as tensors of these names."""
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    _check(form in _LAYOUTS, f"{key}.format", form, ", ".join(_LAYOUTS))
    types = _LAYOUTS[str(form)]
    _check((kind, bits) in types, f"{key}.weights.num_bits", f"{kind} {bits}", ", ".join(f"{t} {n}" for t, n in types))
    rows, columns = _blocks(weights, key)
    activations = None if inputs is None else _activations(inputs, f"{key}.input_activations", columns)
    if form == "mxfp4-pack-quantized":
        _check(columns == GROUP, f"{key}.weights.group_size", columns, f"{GROUP} with MXFP4")
        _check(inputs is None, f"{key}.input_activations", inputs, "none with MXFP4")
        return lambda names: MXFP4()
    needed = {"weight_zero_point"} if weights.get("symmetric") is False else set()
    if form == "pack-quantized":
        _check(rows == 1, f"{key}.weights.strategy", weights.get("strategy"), "channel, group")
        needed |= {"weight_g_idx"} if str(weights.get("actorder")).lower() in ("group", "dynamic", "true") else set()
        integer: Any = "int4" if bits == 4 else "int8"
        return lambda names: PackedRows(integer, columns, names | needed, activations)
    code: Any = "fp8" if kind == "float" else "int8"
    return lambda names: Unpacked(
        code, rows, columns, zero_point="weight_zero_point" in names | needed, activations=activations
    )


def _blocks(weights: Raw, key: str) -> tuple[int | None, int | None]:
    """Rows and columns of one scale, see `Unpacked`."""
    size = weights.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or inferred
    if strategy == "group":
        return 1, _group(weights)
    if strategy == "block":
        return _block(weights.get("block_structure") or (), f"{key}.weights.block_structure")
    _check(strategy in ("tensor", "channel"), f"{key}.weights.strategy", strategy, "tensor, channel, group, block")
    return (1 if strategy == "channel" else None), None


def _activations(inputs: Raw, key: str, columns: int | None) -> Activations:
    """`columns`: weights of one scale. A dynamic scale is that of a row, also where the config has one for a batch."""
    check_fields(inputs, _ARGUMENTS, key)
    bits, kind, strategy = inputs.get("num_bits", 8), inputs.get("type", "int"), inputs.get("strategy") or "tensor"
    _check(bits == 8 and kind in ("int", "float"), f"{key}.num_bits", f"{kind} {bits}", "int 8, float 8")
    _check(inputs.get("symmetric") is not False, f"{key}.symmetric", False, "true")
    known = ("token", "tensor", "group") if inputs.get("dynamic") else ("tensor",)
    _check(strategy in known, f"{key}.strategy", strategy, f"{', '.join(known)} with dynamic={inputs.get('dynamic')}")
    group = inputs.get("group_size") if strategy == "group" else None
    _check(group in (None, columns), f"{key}.group_size", group, f"the group size of the weights ({columns})")
    return Activations("fp8" if kind == "float" else "int8", group, static=not inputs.get("dynamic"))


METHODS: Final[Mapping[str, Callable[[Raw, Names], FormatOf]]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}
