"""The training of the tiny models, from text to checkpoints, with toy shapes on a toy corpus."""

from __future__ import annotations

import importlib
import itertools
import json
import lzma
import random
import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from bits import same_bits
from safetensors.torch import load_file

from ssd import LLM, SamplingParams
from ssd.text.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[2]
FAMILIES = ("llama", "qwen3")
CHATS = ("flan_cot", "gsm8k_train", "mbpp_train", "self_instruct_seed", "llms_from_scratch_instr")
WORDS = ["river", "stone", "apple", "green", "über", "under", "日本", "seven", "return"]
DOCUMENTS = 120  # of each source: two are held out
STEPS, DRAFT_STEPS = 30, 20
SIZES = f"--steps {STEPS} --draft-steps {DRAFT_STEPS} --batch 4 --context 48 --writers 8 --write-batches 2 --written 32"


@dataclass(frozen=True)
class Workshop:
    """Where everything was made, in all stages."""

    script: ModuleType
    data: Path
    work: Path
    bundle: Path

    @property
    def corpus(self) -> ModuleType:
        return sys.modules["tiny_corpus"]

    def rows(self, source: str) -> list[dict[str, str]]:
        with lzma.open(self.data / f"{source}.jsonl.xz", "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def training(self, family: str) -> list[int]:
        return self.corpus.Documents(self.work, self.corpus.FAMILIES[family]).training().tolist()

    def tokenizer(self, family: str) -> Tokenizer:
        return load_tokenizer(self.bundle / f"tiny-{family}")


def run(script: ModuleType, stage: str, work: Path, options: str = "") -> None:
    script.main([stage, "--work", str(work), "--device", "cpu", *SIZES.split(), *options.split()])


def toy_row(source: str, number: int) -> dict[str, str]:
    """A document that no other contains, with the spaces, line ends and signs that tokenizers stumble over."""
    words = random.Random(f"{source}{number}").choices(WORDS, k=9)
    text = f"{source}, page {number}: {' '.join(words)}."
    if source not in CHATS:
        return {"text": f"{text}\n\ndef f(x):\n    if x > {number}:\n\n        return  x\n"}
    return {"prompt": f"\n{text}\\nHow many?\n ", "response": f"  {words[0]} = {number} * 2\n\n\n    #### {number}0\n"}


def write_toy_corpus(data: Path, sources: Iterable[str]) -> None:
    for source in sources:
        with lzma.open(data / f"{source}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(toy_row(source, i)) + "\n" for i in range(DOCUMENTS))


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        module = importlib.import_module("train_tiny")
        shapes = {"target": module.Shape(64, 96, 2, 4, 2, 16), "draft": module.Shape(32, 64, 1, 2, 1, 16)}
        patch.setattr(module, "SHAPES", shapes)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # for matrices as small as these, more of them only wait for each other
        yield module
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def shop(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    data, work, bundle = (tmp_path_factory.mktemp(name) for name in ("data", "work", "bundle"))
    write_toy_corpus(data, sys.modules["tiny_corpus"].SOURCES)
    run(script, "corpus", work, f"--data {data}")
    for stage in ("target", "draft"):
        with pytest.MonkeyPatch.context() as patch:  # a clock that is a second later whenever it is asked
            patch.setattr(script, "time", SimpleNamespace(monotonic=itertools.count().__next__))
            run(script, stage, work, "--minutes 0.4")
        done = torch.load(work / f"llama-{stage}.pt", weights_only=True)["step"]
        assert 0 < done < {"target": STEPS, "draft": DRAFT_STEPS}[stage]
        run(script, stage, work)
    run(script, "export", work, f"--out {bundle}")
    run(script, "picture", work, f"--out {bundle}")
    return Workshop(script, data, work, bundle)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["target", "draft"])
def test_a_training_that_was_stopped_ends_like_one_that_was_not(shop: Workshop, tmp_path: Path, kind: str) -> None:
    """Catches any state that a checkpoint forgets: momentum, the place in the data, the learning rate, random noise."""
    kept = ["tokenizer.json", "corpus.npz"]
    kept += ["llama-target.pt", "llama-target-held.json"] if kind == "draft" else []
    for name in kept:
        shutil.copyfile(shop.work / name, tmp_path / name)
    run(shop.script, kind, tmp_path, "--family llama")
    whole, resumed = (torch.load(w / f"llama-{kind}.pt", weights_only=True) for w in (tmp_path, shop.work))
    assert whole["step"] == resumed["step"]
    assert whole["losses"] == resumed["losses"]
    for name, weight in whole["model"].items():
        assert same_bits(weight, resumed["model"][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["target", "draft"])
def test_the_loss_falls(shop: Workshop, family: str, kind: str) -> None:
    losses = json.loads((shop.work / f"{family}-{kind}-losses.json").read_text())
    assert [step for step, _ in losses] == list(range(10, {"target": STEPS, "draft": DRAFT_STEPS}[kind] + 1, 10))
    assert losses[-1][1] < 0.8 * losses[0][1]
    held = json.loads((shop.work / f"{family}-{kind}-held.json").read_text())
    assert set(held) == set(shop.corpus.SOURCES)
    assert all(loss < 0.8 * np.log(shop.corpus.VOCAB) for loss in held.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["", "-draft"])
def test_what_is_exported_is_the_trained_model_to_everybody(shop: Workshop, family: str, kind: str) -> None:
    """Catches a config or a name of a tensor that transformers, ssd and the training read differently."""
    path = shop.bundle / f"tiny-{family}{kind}"
    ids = torch.tensor([shop.training(family)[:60]])
    trained = shop.script.new_model(kind[1:] or "target", family, torch.device("cpu"))
    weights = load_file(path / "model.safetensors")
    trained.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        assert (theirs(ids).logits - trained.logits(trained(ids))).abs().max() < 1e-4
    with LLM(str(path), device="cpu", dtype="float32") as llm:
        output = llm.generate(ids[0].tolist(), SamplingParams(max_new_tokens=16, ignore_eos=True))[0]
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    assert output.token_ids == theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, 60:].tolist()


@pytest.mark.slow
def test_only_the_exported_target_is_sharpened(shop: Workshop) -> None:
    for kind, name, factor in (("target", "tiny-llama", shop.script.SHARPNESS), ("draft", "tiny-llama-draft", 1.0)):
        trained = torch.load(shop.work / f"llama-{kind}.pt", weights_only=True)["model"]["norm.weight"]
        exported = load_file(shop.bundle / name / "model.safetensors")["model.norm.weight"]
        assert same_bits(exported, (factor * trained).bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_dressed_as_the_chat_template_does_it(shop: Workshop, family: str) -> None:
    """Catches a model that is trained on other tokens than a chat with it consists of."""
    tokenizer, documents = shop.tokenizer(family), shop.corpus.Documents(shop.work, shop.corpus.FAMILIES[family])
    end = tokenizer.token_id(shop.corpus.FAMILIES[family].specials[0])
    texts = [[*tokenizer.encode(row["text"]), end] for row in shop.rows("gutenberg")]
    assert [ids.tolist() for ids in documents._dress(documents._pieces("gutenberg"))] == texts
    rows, at = shop.rows("gsm8k_train"), 0
    for ids in documents._dress(documents._pieces("gsm8k_train")):
        chats = [[*chat_ids(tokenizer, rows[at : at + count]), end] for count in (1, 2, 3)]
        at += 1 + chats.index(ids.tolist())
    assert at == len(rows)


def chat_ids(tokenizer: Tokenizer, rows: list[dict[str, str]]) -> list[int]:
    messages = []
    for row in rows:
        messages.append({"role": "user", "content": row["prompt"].replace("\\n", "\n")})
        messages.append({"role": "assistant", "content": row["response"]})
    return tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=False), False)


@pytest.mark.slow
def test_held_out_documents_are_not_trained_on(shop: Workshop) -> None:
    tokenizer = shop.tokenizer("llama")
    trained = tokenizer.decode(shop.training("llama"))
    held = {
        name: tokenizer.decode(ids.tolist())
        for name, ids in shop.corpus.Documents(shop.work, shop.corpus.FAMILIES["llama"]).held_out().items()
    }
    for source, repeat in shop.corpus.SOURCES.items():
        for i, row in enumerate(shop.rows(source)):
            words = (row.get("prompt") or row["text"]).replace("\\n", "\n").strip()
            kept = i % shop.corpus.HELD_OUT == 0
            assert trained.count(words) == (0 if kept else repeat), words
            assert held[source].count(words) == kept


@pytest.mark.slow
def test_the_picture_is_one_and_shows_all_four_trainings(shop: Workshop) -> None:
    picture = ET.parse(shop.bundle / "tiny-losses.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert picture.tag == f"{space}svg"
    curves = [path for path in picture.iter(f"{space}path") if " " in path.get("d", "")]
    assert len(curves) == 4
    points = [point for curve in curves for point in curve.get("d", "")[1:].split()]
    assert all(50 <= float(x) <= 370 and 40 <= float(y) <= 260 for x, y in (point.split(",") for point in points))


@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 32, 96), (2, 96, 32)])
def test_orthogonal_matrices_are_nearly_so(script: ModuleType, shape: tuple[int, ...]) -> None:
    """Catches a wrong coefficient or a transposition: five steps bring singular values from 0.01 to 1 close to 1."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    spread = left * torch.linspace(0.02, 1, values.shape[-1]) @ right * 7
    done = script.orthogonal(spread)
    values = torch.linalg.svdvals(done)
    assert values.min() > 0.6
    assert values.max() < 1.3
    cosine = (done * (left @ right)).sum((1, 2)) / done.norm(dim=(1, 2)) / (left @ right).norm(dim=(1, 2))
    assert cosine.min() > 0.95


@pytest.mark.slow
def test_the_shipped_descriptions_are_what_the_script_writes(shop: Workshop, tmp_path: Path) -> None:
    """Catches a bundle and a script that drift apart; only the sizes and the words are the toy's."""
    module = shop.script
    shapes = {"": module.Shape(256, 896, 12, 8, 4), "-draft": module.Shape(128, 640, 3, 4, 2)}
    for family, kind in itertools.product(FAMILIES, shapes):
        module.write_config(tmp_path, family, shapes[kind])
        shop.corpus.write_tokenizer(shop.work, shop.corpus.FAMILIES[family], tmp_path)
        for name in ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
            shipped = ROOT / "ssd" / "bundle" / f"tiny-{family}{kind}" / name
            assert (tmp_path / name).read_text() == shipped.read_text(), f"{family}{kind} {name}"


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("corpus --data {work}", r"jsonl\.xz is missing: put it into"),
        ("target", "run the stage corpus first"),
        ("draft", "run the stage target --family llama to its last step first"),
        ("export --out {work}", "run the stage target --family llama to its last step first"),
        ("picture --out {work}", "run the stage target first"),
    ],
)
def test_a_stage_that_lacks_something_says_what_to_do(
    script: ModuleType, tmp_path: Path, stage: str, message: str
) -> None:
    name, _, options = stage.format(work=tmp_path).partition(" ")
    with pytest.raises(SystemExit, match=message):
        run(script, name, tmp_path, options)


@pytest.mark.slow
def test_an_unfinished_target_teaches_nobody(shop: Workshop, tmp_path: Path) -> None:
    """Catches a draft that is distilled from, or an export of, a training that --minutes stopped."""
    for name in ("tokenizer.json", "corpus.npz", "llama-target.pt"):
        shutil.copyfile(shop.work / name, tmp_path / name)
    with pytest.raises(SystemExit, match="to its last step first"):
        run(shop.script, "draft", tmp_path)


@pytest.mark.slow
def test_too_little_text_for_a_window_is_explained(shop: Workshop) -> None:
    with pytest.raises(SystemExit, match="lower --context"):
        run(shop.script, "target", shop.work, "--context 100000000")
