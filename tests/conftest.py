"""Small random checkpoints, made on the spot with transformers, one folder per kind and session."""

from __future__ import annotations

import functools
import gc
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: with models this small, threads only wait for each other
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # and where a test asks for more, they wait without taking a core
os.environ.setdefault("SSD_WEIGHT_CACHE", "0")  # tests of it have a folder of their own

import hypothesis
import pytest

# torch, transformers and ssd are imported where they are used: the process that hands tests to `pytest -n` needs none,
# and nothing else runs until it has started.
if TYPE_CHECKING:
    import torch
    from live_server import Served
    from random_requests import Models
    from stand_in_hub import StandInHub
    from tokenizers import Tokenizer

    from ssd import LLM


@functools.cache
def has_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    import torch

    return torch.cuda.is_available()


os.environ.setdefault("TRITON_INTERPRET", "0" if has_gpu() else "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell; Ctrl-C is tested, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Test machines are shared: a slow example is no failure. The same examples in every run, so that a change is judged by
# itself; `--hypothesis-profile=search` (part of `make test-all`) tries new ones.
hypothesis.settings.register_profile("search", deadline=None, max_examples=200)
hypothesis.settings.register_profile("same", deadline=None, max_examples=12, derandomize=True)
hypothesis.settings.load_profile("same")

VOCAB = 320
REAL_TOKENIZERS = Path(os.environ.get("SSD_TEST_TOKENIZERS", "tokenizers"))  # with llama-3.2/ and qwen3/ in it
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # decisive logits: random text instead of one repeated token
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama3-scaled": (
        "Llama",
        {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama-biased": (
        "Llama",
        {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}),
    "mistral-windows": ("Mistral", {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 37}),
    "qwen2-windows": (
        "Qwen2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 2,
        },
    ),
    "qwen3-windows": (
        "Qwen3",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": ("Mixtral", {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}),
    "gpt-oss": (
        "GptOss",
        {
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 24},
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "rope_parameters": YARN},
        },
    ),
}
LATENT: dict[str, Any] = {
    **{"num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 40, "v_head_dim": 20},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "moe_intermediate_size": 40, "num_experts_per_tok": 3},
}
KINDS |= {
    "glm4-moe-lite": ("Glm4MoeLite", {**LATENT, "n_routed_experts": 6}),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **{**LATENT, "n_routed_experts": 12, "n_shared_experts": 2, "n_group": 4, "topk_group": 2},
            **{"first_k_dense_replace": 1, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
        },
    ),
}
WINDOWED = [kind for kind in KINDS if kind.endswith("windows")]
WITH_LATENTS = ["glm4-moe-lite", "deepseek-v3"]
WITH_EXPERTS = ["qwen3-moe", "mixtral", "gpt-oss"]


def interpret_products_in_order() -> None:
    """Makes Triton's interpreter add up every element of a product by itself, first to last, so that bits can be
    compared: NumPy's products have other bits for other numbers of rows, depending on the processor."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def in_order(self: Any, a: Any, b: Any, d: Any, *others: Any) -> Any:
        if any(x.dtype.is_floating() and x.dtype.primitive_bitwidth == 8 for x in (a, b)):
            return dot(self, a, b, d, *others)
        left, right = (x.data.astype(d.data.dtype) for x in (a, b))
        product = (left[..., :, :, None] * right[..., None, :, :]).sum(axis=-2, dtype=d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = in_order


def interpret_without_repetition() -> None:
    """Triton's interpreter replaces the functions of its language anew for every call of a device function, though they
    are replaced as long as a kernel runs, and builds a table of types for every operation: a third of its time."""
    from triton import language
    from triton.runtime import interpreter

    replace, find_type = interpreter._patch_lang, interpreter._get_np_dtype
    known_type = functools.cache(find_type)

    def once(function: Any) -> Any:
        seen = [each for each in function.__globals__.values() if each is language or each is language.core]
        if seen and not any(language.core.is_builtin(each.load) for each in seen):
            return interpreter._LangPatchScope()
        return replace(function)

    def scalar_type(kind: Any) -> Any:
        return find_type(kind) if kind.scalar.is_ptr() else known_type(kind.scalar)

    interpreter._patch_lang, interpreter._get_np_dtype = once, scalar_type


def interpret_with_known_shapes() -> None:
    """Triton's language describes the type and the shape of every value anew: a third of the interpreter's time."""
    from triton import language

    describe, hold = language.block_type.__init__, language.tensor.__init__
    types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def known_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if type(element_ty) is not language.dtype:  # pointers have more to them than a name
            describe(self, element_ty, shape)
        elif key in types:
            vars(self).update(types[key])
        else:
            describe(self, element_ty, shape)
            types[key] = dict(vars(self))

    def known_shape(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        if key in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[key]
        else:
            hold(self, handle, type)
            shapes[key] = self.shape, self.numel

    language.block_type.__init__, language.tensor.__init__ = known_type, known_shape


def interpret_without_idle_work() -> None:
    """Triton's language computes whether integers overflow, which nobody looks at but for debugging, and broadcasts
    values of one shape: 40% of the interpreter's time."""
    from triton.language.semantic import TritonSemantic

    check, broadcast = TritonSemantic.binary_op_sanitize_overflow_impl, TritonSemantic.broadcast_impl_value

    def checked(self: Any, *operation: Any) -> None:
        if self.builder.options.debug:
            check(self, *operation)

    def broadcasted(self: Any, left: Any, right: Any) -> Any:
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)  # of `known_shape`

    TritonSemantic.binary_op_sanitize_overflow_impl = checked
    TritonSemantic.broadcast_impl_value = broadcasted


def pytest_configure(config: pytest.Config) -> None:
    """Not in the process that hands tests to others: they wait for it."""
    if getattr(config.option, "numprocesses", None):
        return
    if os.environ["TRITON_INTERPRET"] == "1" and find_spec("triton") is not None:
        interpret_products_in_order()
        interpret_without_repetition()
        interpret_with_known_shapes()
        interpret_without_idle_work()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes of `pytest -n auto`: one for each core. A GPU is not shared (see the Makefile)."""
    return 1 if has_gpu() else min(os.cpu_count() or 1, 16)


def pytest_collectstart() -> None:
    """Looking for garbage among what is imported would take a fifth of the time to collect tests."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is imported is there to stay: a closed LLM collects garbage, which would take 0.3 s with all of that."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """So is what a file's tests have imported and left, once its fixtures are gone: a quarter of the time of tests of
    the server went into looking for garbage among that."""
    if nextitem is not None and nextitem.path != item.path:
        pytest_collection_finish()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu_memory")
    if marker is not None and has_gpu():
        import torch

        if torch.cuda.mem_get_info()[1] < marker.args[0] << 30:
            pytest.skip(f"needs {marker.args[0]} GiB of GPU memory")


@dataclass(frozen=True)
class TestModel:
    """A checkpoint on disk, and transformers' own model of it."""

    __test__ = False
    path: str
    reference: Any


@pytest.fixture(scope="session", autouse=True)
def _quick_clients() -> Iterator[None]:
    """Most of an HTTP client's start is reading certificates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _commands_are_described_once() -> Iterator[None]:
    """Typer builds all commands from their functions for every call of one of them: half of the time of `--help`."""
    with pytest.MonkeyPatch.context() as patch:
        if "typer.testing" in sys.modules:
            testing = sys.modules["typer.testing"]
            patch.setattr(testing, "_get_command", functools.cache(testing._get_command))
        yield


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TestModel]:
    made: dict[str, TestModel] = {}

    def make(kind: str) -> TestModel:
        if kind not in made:
            made[kind] = save_model(kind, tmp_path_factory.mktemp(kind))
            pytest_collection_finish()  # transformers has imported a model
        return made[kind]

    return make


@pytest.fixture(scope="session")
def models(make_model: Callable[[str], TestModel], tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A small random Llama, and drafts of every kind for it."""
    from random_requests import make_models

    return make_models(make_model, tmp_path_factory.mktemp("noisy"))


def save_model(kind: str, path: Path) -> TestModel:
    """Writes the random checkpoint of a kind to a folder."""
    import torch
    import transformers

    family, changes = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    randomise_vectors(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path, max_shard_size="100KB")
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return TestModel(str(path), model)


def randomise_vectors(model: torch.nn.Module) -> None:
    """Norm weights of one and biases of zero would hide that they are ignored."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(0.0 if "bias" in name else 1.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2)


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and enough spare ones to fill the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    vocabulary |= {f"<spare{i}>": i for i in range(len(vocabulary), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="session")
def smollm2() -> str:
    """SmolLM2-135M-Instruct, a real model, as the one data file of a package."""
    script = Path(__file__).parent.parent / "scripts" / "find_smollm2.py"
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(found.stderr.strip())
    return found.stdout.strip()


@pytest.fixture(scope="session")
def smollm2_reference(smollm2: str) -> Any:
    """transformers' own model of the same file, in float32."""
    pytest.importorskip("accelerate", reason="transformers needs accelerate to load a GGUF")
    gguf = pytest.importorskip("gguf")
    import torch
    import transformers

    path = Path(smollm2)
    with pytest.MonkeyPatch.context() as patch:  # transformers builds the same map of names for each of 400 modules
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def mostly_slow(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Values of a parameter, or tuples of several: those that are not in `fast` are left to the long run."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[] if value in fast else pytest.mark.slow
        )
        for value in values
    ]


def ragged_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of different lengths; half of them begin alike, so that the prefix cache has something to find."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(0, VOCAB, (longest,), generator=generator).tolist()
    prompts = []
    for i in range(count):
        length = 1 + int(torch.randint(0, longest, (1,), generator=generator))
        own = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        common = length * 2 // 3 if i % 2 else 0
        prompts.append(shared[:common] + own[common:])
    return prompts


# --- a server of the bundled model, for the tests in server/ (a conftest.py there would hide this one) ----------------


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    from ssd import LLM

    with LLM("tiny-llama-draft", device="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def served(llm: LLM) -> Iterator[Served]:
    from live_server import serving

    with serving(llm) as running:
        yield running


@pytest.fixture(scope="session")
def strict(llm: LLM) -> Iterator[Served]:
    """A server that refuses what it does not know."""
    from live_server import serving

    with serving(llm, strict_parameters=True) as running:
        yield running


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """A stand-in of the Hugging Face hub, in place of it and of every cache."""
    from stand_in_hub import the_only_hub

    with the_only_hub(tmp_path / "home", monkeypatch) as running:
        yield running


@pytest.fixture
def llama(make_model: Callable[[str], TestModel]) -> Path:
    """A small random Llama."""
    return Path(make_model("llama-tied").path)
