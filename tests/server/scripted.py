"""A model with a chat template for tools and reasoning, and answers that are given instead of generated."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ssd
from ssd.core import Delta, RequestMetrics, RequestOutput, Sample, SamplingParams
from ssd.server.errors import invalid
from ssd.server.openai import chat

TEMPLATE = """\
{% if tools %}<|im_start|>system
Tools: {{ tools | tojson }}. Write <tool_call>{"name": …, "arguments": …}</tool_call> to call one.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or '' }}\
{% for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if think %}<think>
{% endif %}{% endif %}"""

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
ARGUMENTS = '{"city": "Rome", "days": 2}'


LLAMA_TEMPLATE = """\
{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content }}{% if tools %}{{ tools | tojson }}{% endif %}<|eot_id|>{% endfor %}\
<|start_header_id|>assistant<|end_header_id|>

"""


def checkpoint(
    folder: Path, model: str = "tiny-qwen3-draft", template: str = TEMPLATE, special: Sequence[str] = ()
) -> Path:
    """A bundled model with a template, and with these special tokens in place of its reserved ones."""
    shutil.copytree(Path(ssd.__file__).parent / "bundle" / model, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        text = file.read_text()
        for i, token in enumerate(special):
            text = text.replace(f'"<|reserved_{i}|>"', json.dumps(token))
        file.write_text(text)
    return folder


class Scripted:
    """Stands in for `Generation`: answers with a text, in pieces of three characters."""

    def __init__(self, text: str, prompt_token_ids: list[int], params: SamplingParams, reason: Any) -> None:
        self.prompt_token_ids = prompt_token_ids
        sample = Sample(0, text, [5] * len(text), reason, None, RequestMetrics())
        self.output = RequestOutput("scripted", prompt_token_ids, [sample], None, params)

    async def pauses(self) -> AsyncIterator[None]:
        for _ in ():
            yield

    async def deltas(self) -> AsyncIterator[Delta]:
        text = self.output.text
        for i in range(0, len(text), 3):
            yield Delta("scripted", 0, [5], text[i : i + 3], [])
        yield Delta("scripted", 0, [], "", [], finish_reason=self.output.finish_reason)

    async def finish(self) -> RequestOutput:
        return self.output


class Script:
    """What the model answers, and what it was asked."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason = "stop"
        self.prompt = ""

    def start(self) -> Callable[..., Any]:
        async def start(state: Any, prompts: Any, params: SamplingParams, *, chat_options: Any, **_: Any) -> Any:
            [ids] = [state.llm.encode(prompt, chat_options) for prompt in prompts]
            self.prompt = state.llm.decode(ids, skip_special_tokens=False)
            return [Scripted(self.text, ids, params, self.finish_reason)]

        return start


def long_checkpoint(folder: Path, positions: int = 32768) -> Path:
    """The smallest bundled model with this template, for prompts that are longer than it was trained for."""
    path = checkpoint(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": positions}))
    return folder


@contextmanager
def writing(*texts: str, end: str = "<|im_end|>") -> Iterator[None]:
    """The model of any server writes these texts, one a chat; without texts its own, of a few tokens."""
    params, left = chat._params, list(texts)

    def changed(body: Any, state: Any) -> SamplingParams:
        given = params(body, state)
        if not texts:
            return replace(given, max_new_tokens=min(given.max_new_tokens, 32))
        if not left:
            raise invalid("messages", "the script has no text for this request")
        return replace(given, logits_processor=Forced(state.llm.tokenizer, left.pop(0) + end))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "_params", changed)
        yield


HARMONY_TOKENS = {  # tokens of Harmony, in place of special ones of tiny-llama
    **{"reserved_0": "start", "reserved_1": "end", "reserved_2": "message", "start_header_id": "channel"},
    **{"end_header_id": "constrain", "end_of_text": "return", "eot_id": "call"},
}


def harmony_checkpoint(folder: Path) -> Path:
    """A random GPT-OSS, whose tokenizer is that of a bundled model with the tokens of Harmony."""
    transformers = pytest.importorskip("transformers")
    checkpoint(folder, "tiny-llama", "{# <|start|><|channel|><|message|> #}")
    (folder / "model.safetensors").unlink()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    experts = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(vocab_size=8192, **sizes, **experts))
    model.generation_config.eos_token_id = [8187, 8191]  # <|return|> and <|call|>
    model.save_pretrained(folder)
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        text = file.read_text()
        for old, new in HARMONY_TOKENS.items():
            text = text.replace(f'"<|{old}|>"', f'"<|{new}|>"')
        file.write_text(text)
    return folder


class Forced:
    """A logits processor: the model writes these texts, one a request, as tokens of its tokenizer.

    `pause`: seconds before each token, in which a busy machine sends those before it: otherwise it joins them.
    """

    def __init__(self, tokenizer: Any, *texts: str, pause: float = 0.0) -> None:
        self._pause = pause
        self._answers = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        self._left: list[int] = []

    def __call__(self, token_ids: list[int], logits: Any) -> Any:
        time.sleep(self._pause)
        if not self._left:
            self._left = self._answers.pop(0)
        chosen = self._left.pop(0)
        logits[:] = float("-inf")
        logits[chosen] = 0.0
        return logits
