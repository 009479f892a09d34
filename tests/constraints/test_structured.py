"""Structured output: every text is valid, and the same in AR, SD and SSD; neighbours without a constraint lose nothing.

On the bundled models. Schemas are bounded, so that even a small model comes to an end.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from ssd import LLM, SamplingParams
from ssd.constraints.grammars import Grammars
from ssd.core import RequestMetrics, RequestOutput, Sample
from ssd.errors import ALL_FORBIDDEN, NO_CHOICE, STRUCTURED_FAILED, ParametersFailed, RequestError, RequestFailed
from ssd.llm import check_served

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

PROMPT = "Write it as JSON: "
WORD = {"type": "string", "maxLength": 8}


def record(additional: bool = False, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": additional,
    }


SCHEMAS: dict[str, Any] = {
    "nested": record(a=record(b=record(c={"type": "boolean"}, d={"type": "null"}))),
    "enum": {"enum": ["rouge", "vert", "bleu", 3, None, True]},
    "const": record(kind={"const": "point"}, origin={"const": [0, 0]}),
    "array": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "minItems": 2, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["x", "y"]}],
        "items": False,
        "minItems": 2,
    },
    "integers": record(a={"type": "integer", "minimum": 10, "maximum": 99}, b={"type": "integer", "enum": [7]}),
    "numbers": record(a={"type": "number", "exclusiveMinimum": 0, "maximum": 1, "multipleOf": 0.25}),
    "pattern": record(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "unicode": record(größe={"enum": ["süß", "日本語", "😀"]}, 名前={"type": "string", "pattern": "^[ぁ-ん]{1,3}$"}),
    "anyOf": {"anyOf": [record(a={"type": "integer", "maximum": 9, "minimum": 0}), {"type": "array", "maxItems": 0}]},
    "oneOf": {"oneOf": [record(cat={"type": "boolean"}), record(dog=WORD)]},
    "date": record(day={"type": "string", "format": "date"}, address={"type": "string", "format": "ipv4"}),
    "uuid": {"type": "string", "format": "uuid"},
    "optional": {"type": "object", "properties": {"a": WORD, "b": {"type": "boolean"}}, "additionalProperties": False},
    "reference": {"$defs": {"leaf": record(v={"enum": [1, 2]})}, **record(l={"$ref": "#/$defs/leaf"})},
    "length": {"type": "string", "minLength": 3, "maxLength": 6},
}
REGEXES = [r"[a-f]{4,9}", r"\d{3}-\d{4}", r"(yes|no), (truly|really)\.", r"[^\n]{1,12}\n", "ä{2,5}"]
CHOICES = [["yes", "no", "perhaps"], ["a", "aa", "aaa"], ['with "quotes"', "back\\slash", "new\nline", "😀"]]
GRAMMARS = {
    'start: "(" NUMBER ("," NUMBER)~1..3 ")"\nNUMBER: /[0-9]{1,2}/': r"\(\d{1,2}(,\d{1,2}){1,3}\)",
    'root ::= "x" ("+" "x")? | "y"': r"x(\+x)?|y",  # GBNF
}


def mixed(temperatures: Seq[float] = (0.0, 1.0)) -> list[SamplingParams]:
    """All kinds, and every third request without a constraint."""
    wanted = [{"json_schema": schema} for schema in SCHEMAS.values()]
    wanted += [{"regex": regex} for regex in REGEXES] + [{"choice": choice} for choice in CHOICES]
    wanted += [{"grammar": grammar} for grammar in GRAMMARS]
    params = []
    for i, structured in enumerate(wanted):
        seed, temperature = 100 + i, temperatures[i % len(temperatures)]
        shape = {"top_p": 0.9} if i % 4 == 1 else {"repetition_penalty": 1.1} if i % 4 == 2 else {}
        params.append(SamplingParams(temperature, seed=seed, max_tokens=120, structured=structured, **shape))  # type: ignore[arg-type]
        if i % 3 == 0:
            params.append(SamplingParams(temperature, seed=seed, max_tokens=30, logprobs=1 if i % 2 else None))
    return params


def check(output: RequestOutput) -> None:
    """The text is complete and valid."""
    wanted = output.params.structured
    for sample in output.samples:
        assert (output.error, sample.finish_reason) == (None, "stop"), (wanted, output)
        check_text(wanted, sample.text)


def check_text(wanted: Any, text: str) -> None:
    if wanted.json_schema is not None:
        validator = jsonschema.Draft202012Validator(json.loads(wanted.json_schema), format_checker=FORMATS)
        validator.validate(json.loads(text))
    elif wanted.json_object:
        assert isinstance(json.loads(text), dict)
    elif wanted.choice is not None:
        assert text in wanted.choice
    else:
        assert re.fullmatch(wanted.regex or GRAMMARS[wanted.grammar], text), (wanted, text)


FORMATS = jsonschema.FormatChecker(["ipv4", "uuid"])  # "date" refuses the year 0 and February 29th of most years


def answers(outputs: Seq[RequestOutput]) -> list[Any]:
    return [[(s.token_ids, s.text, s.finish_reason, s.logprobs) for s in output.samples] for output in outputs]


def generate(params: Seq[SamplingParams], *, run_ahead: bool = False, **options: Any) -> list[RequestOutput]:
    options = {"max_model_len": 512, "max_num_seqs": 16, **options}
    with LLM("tiny-llama", device="cpu", **options) as llm:
        llm.driver.call(lambda engine: setattr(engine.round, "run_ahead", run_ahead))
        outputs = llm.generate([PROMPT] * len(params), list(params))
        llm.driver.call(lambda engine: engine.check())
    return outputs


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-llama", device="cpu", max_model_len=512, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[RequestOutput]:
    """Answers without drafts. They are complete and valid."""
    params = mixed()
    outputs = llm.generate([PROMPT] * len(params), params)
    for output in outputs:
        if output.params.structured is not None:
            check(output)
    return outputs


def sd(**options: Any) -> dict[str, Any]:
    return {"mode": "sd", "draft": "tiny-llama-draft"} | options


def ssd(**options: Any) -> dict[str, Any]:
    return {"mode": "ssd", "draft": "tiny-llama-draft", "placement": "inline", "budget": 4, **options}


SPECULATIONS: dict[str, dict[str, Any]] = {
    "sd-1": sd(k=1),
    "sd-4": sd(k=4),
    "ssd-2": ssd(k=2, backup="jit"),
    "suffix": {"mode": "sd", "draft": "suffix", "k": 4},
    "tree": sd(draft="tiny-llama-eagle", k=4, tree=12),
    "ssd-tree": ssd(k=2, tree=20, backup="fast"),  # trees that have fewer nodes than there is room for
}


@pytest.mark.slow  # the next test is the short one
@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_same_text_with_drafts(alone: list[RequestOutput], speculation: str) -> None:
    """Catches a mask of another position, a draft that breaks the grammar and stands, and a changed neighbour."""
    outputs = generate(mixed(), speculation=SPECULATIONS[speculation])
    assert answers(outputs) == answers(alone)
    assert sum(output.metrics.accepted for output in outputs if output.params.structured) > 0


@pytest.mark.parametrize(
    "speculation",
    [
        pytest.param(None, id="ar", marks=pytest.mark.slow),
        pytest.param(sd(k=3), id="sd", marks=pytest.mark.slow),
        pytest.param(ssd(k=3, backup="fast"), id="ssd"),
        pytest.param(SPECULATIONS["tree"], id="tree", marks=pytest.mark.slow),
        pytest.param(SPECULATIONS["ssd-tree"], id="ssd-tree", marks=pytest.mark.slow),
    ],
)
def test_same_text_with_rounds_in_flight(alone: list[RequestOutput], speculation: dict[str, Any] | None) -> None:
    """Catches a round that is launched for a constrained sequence before its last tokens are known."""
    options = {} if speculation is None else {"speculation": speculation}
    assert answers(generate(mixed()[::8], run_ahead=True, **options)) == answers(alone[::8])


def test_neighbours_run_ahead() -> None:
    """A constrained request does not make the others wait: these have a round in flight all the time."""
    with LLM("tiny-llama-draft", device="cpu", max_model_len=256) as llm:

        def play(engine: Any) -> int:
            engine.round.run_ahead = True
            prompt = [1, 2, 3]
            engine.add(prompt, SamplingParams(max_tokens=20, ignore_eos=True), "free")
            engine.add(prompt, SamplingParams(max_tokens=40, structured={"regex": "[a-z]{30,}"}), "bound")
            rounds = 0
            while engine.num_unfinished_requests == 2:
                engine.step()
                rounds += 1
            return rounds

        assert llm.driver.call(play) <= 22


@pytest.mark.slow
def test_preemption(alone: list[RequestOutput]) -> None:
    """Catches a constraint that is lost, or advanced twice, when its sequence is computed again."""
    outputs = generate(mixed(), num_kv_blocks=40, block_size=8, max_model_len=256, speculation=sd(k=2))
    assert sum(output.metrics.preemptions for output in outputs) > 0
    assert answers(outputs) == answers(alone)


def test_aborts(llm: LLM, alone: list[RequestOutput]) -> None:
    """An abort in mid-text leaves nothing behind, and its neighbours as they were."""
    stream = llm.stream_deltas(PROMPT, SamplingParams(max_tokens=300, structured={"regex": "[a-z ]{200,}"}))
    next(stream)
    stream.abort()
    params = mixed()[:6]
    assert answers(llm.generate([PROMPT] * 6, params)) == answers(alone[:6])
    assert stream.result().finish_reason == "abort"
    llm.driver.call(lambda engine: engine.check())


def test_samples_of_one_request(llm: LLM) -> None:
    params = SamplingParams(1.0, n=4, seed=5, max_tokens=60, structured={"json_schema": SCHEMAS["pattern"]})
    [output] = llm.generate(PROMPT, params)
    check(output)
    assert len({sample.text for sample in output.samples}) > 1


def test_the_end(llm: LLM) -> None:
    """The end-of-sequence token only where the text may end; where it must, none is needed."""
    [extendable] = llm.generate(PROMPT, SamplingParams(structured={"regex": "(ab)+"}, max_tokens=40))
    assert re.fullmatch("(ab)+", extendable.text) or extendable.finish_reason == "length"
    [complete] = llm.generate(PROMPT, SamplingParams(structured={"choice": ["yes"]}, max_tokens=10))
    assert (complete.text, complete.finish_reason) == ("yes", "stop")
    num_tokens = len(complete.token_ids)
    assert not set(complete.token_ids) & llm.engine.stop_token_ids
    [exact] = llm.generate(PROMPT, SamplingParams(structured={"choice": ["yes"]}, max_tokens=num_tokens))
    assert exact.finish_reason == "stop"
    [cut] = llm.generate(PROMPT, SamplingParams(structured={"regex": "[a-z]{100}"}, max_tokens=3))
    assert cut.finish_reason == "length"
    assert re.fullmatch("[a-z]{3,99}", cut.text)


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    """Before the mask: the likeliest token is one that the mask excludes."""
    [output] = llm.generate(PROMPT, SamplingParams(structured={"choice": ["zyx"]}, logprobs=1, max_tokens=5))
    assert output.logprobs is not None
    assert output.logprobs[0].token_id not in output.logprobs[0].top


def test_rejection_of_greedy_requests(alone: list[RequestOutput]) -> None:
    greedy = [output for output in alone if output.params.greedy][::4]
    found = generate([o.params for o in greedy], speculation=sd(k=3, acceptance="rejection"))
    assert [o.token_ids for o in found] == [o.token_ids for o in greedy]


@pytest.mark.slow
def test_rejection_follows_the_masked_distribution(llm: LLM) -> None:
    """The last letters, drawn with drafts and without; drafts often have the letter d, which the mask excludes.

    Catches drafts that are cut where a sampled token breaks the grammar. Two-sample chi-squared with at most 8
    degrees of freedom: above 42.7 with a probability of 1e-6.
    """
    letters = [llm.tokenizer.encode(f" {letter}", add_special_tokens=False)[0] for letter in "abcd"]
    params = SamplingParams(
        1.0,
        seed=1,
        n=512,
        structured={"regex": "x( [abc]){2}"},
        logit_bias=dict(zip(letters, (12, 12, 12, 14), strict=True)),
    )
    counts = []
    for speculation in ({"mode": "ar"}, sd(k=2, acceptance="rejection")):
        [output] = generate([params], speculation=speculation, max_num_seqs=64)
        check(output)
        counts.append(Counter(sample.text for sample in output.samples))
    drafted, accepted = (sum(getattr(s.metrics, name) for s in output.samples) for name in ("drafted", "accepted"))
    assert drafted > 3 * accepted > 300, "drafts that break the grammar are verified, too"
    texts = counts[0].keys() | counts[1].keys()
    chi = sum((counts[0][text] - counts[1][text]) ** 2 / (counts[0][text] + counts[1][text]) for text in texts)
    assert chi < 42.7, counts


BAD: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"type": "thing"}}, "json_schema"),
    ({"json_schema": {"not": {"type": "string"}}}, "json_schema"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema"),
    ({"json_schema": {"type": "object", "x-guidance": {"lenient": True}, "dependentRequired": {}}}, "json_schema"),
    ({"json_schema": {"$ref": "https://example.com/schema.json"}}, "json_schema"),
    ({"json_schema": {"type": "string", "pattern": "(?=a)"}}, "json_schema"),
    ({"regex": "a("}, "regex"),
    ({"regex": "(?<=a)b"}, "regex"),
    ({"regex": r"(a)\1"}, "regex"),
    ({"regex": "(" * 5000 + "a" + ")" * 5000}, "regex"),
    ({"grammar": "start: missing"}, "grammar"),
    ({"grammar": 'start: "a'}, "grammar"),
    ({"grammar": "start: " + "(" * 1000}, "grammar"),
]


@pytest.mark.parametrize(("structured", "named"), BAD, ids=[f"{named}-{i}" for i, (_, named) in enumerate(BAD)])
def test_what_cannot_be_compiled_is_refused(llm: LLM, structured: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=f"^structured.{named}: "):
        llm.generate(PROMPT, SamplingParams(structured=structured))


def test_a_deep_schema_is_refused(llm: LLM) -> None:
    schema: dict[str, Any] = {}
    for _ in range(150):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match=r"^structured.json_schema: "):
        llm.generate(PROMPT, SamplingParams(structured={"json_schema": schema}))


def test_nothing_to_choose(llm: LLM) -> None:
    """Catches a token that is chosen though a bias forbids the ones that the grammar allows."""
    tokens = {int(t): float("-inf") for t in range(llm.engine.limits.vocab_size)}
    with pytest.raises(RequestFailed, match="structured output"):
        llm.generate(PROMPT, SamplingParams(structured={"choice": ["yes"]}, logit_bias=tokens))


def test_a_model_without_a_tokenizer() -> None:
    from ssd.engine.validation import Limits, check_request

    with pytest.raises(RequestError, match=r"^structured: needs a tokenizer"):
        check_request([1], SamplingParams(structured={"json_object": True}), Limits(10, 10, False))


# --- many schemas -----------------------------------------------------------------------------------------------------


def random_schema(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    """A bounded schema of any kind."""
    kinds = ["integer", "number", "string", "pattern", "enum", "const", "boolean", "null", "format", "unicode"]
    if depth < 3:
        kinds += ["object", "object", "object", "array", "array", "anyOf"] * 2
    match dice.choice(kinds):
        case "integer":
            low = dice.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + dice.randint(0, 5000)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": dice.randint(1, 50), "multipleOf": dice.choice([0.5, 2])}
        case "string":
            return {"type": "string", "minLength": dice.randint(0, 2), "maxLength": dice.randint(2, 10)}
        case "pattern":
            return {"type": "string", "pattern": dice.choice(["^[a-z]{1,5}$", r"^\d{2}:\d{2}$", "^(ab|cd){1,3}$"])}
        case "enum":
            return {"enum": dice.sample(["a", "b b", 1, 2.5, None, True, "ü", ["x"], {"k": 1}], dice.randint(1, 5))}
        case "const":
            return {"const": dice.choice(["c", 0, -1.5, False, None, [1, "2"], {"deep": {"er": []}}])}
        case "format":
            return {"type": "string", "format": dice.choice(["date", "ipv4", "uuid"])}
        case "unicode":
            return {"type": "string", "pattern": dice.choice(["^[ぁ-ん]{1,4}$", "^[一-十]{1,2}$", "^(😀|🎉)$"])}
        case "array":
            low = dice.randint(0, 2)
            return {
                "type": "array",
                "items": random_schema(dice, depth + 1),
                "minItems": low,
                "maxItems": low + dice.randint(0, 2),
            }
        case "anyOf":
            return {"anyOf": [random_schema(dice, depth + 1) for _ in range(dice.randint(1, 3))]}
        case "object":
            names = dice.sample(["a", "id", "名", 'q"', "long_name", "x y"], dice.randint(0, 3))
            properties = {name: random_schema(dice, depth + 1) for name in names}
            required = [name for name in names if dice.random() < 0.8]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case kind:
            return {"type": kind}


@pytest.mark.slow
def test_two_hundred_schemas() -> None:
    dice = random.Random(7)
    params = [
        SamplingParams(float(i % 2), seed=i, max_tokens=700, structured={"json_schema": random_schema(dice)})
        for i in range(200)
    ]
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 32}
    plain = generate(params, **options)
    for output in plain:
        check(output)
    for speculation in (sd(k=3), ssd(k=4)):
        assert answers(generate(params, speculation=speculation, **options)) == answers(plain)


def test_the_engines_thread_compiles_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request needs travels with it: a grammar that others have pushed out meanwhile is not compiled again."""
    params = SamplingParams(max_new_tokens=8, n=3, structured={"regex": "[ab]{3}"})
    checked = llm.driver.check([1, 2, 3], params)
    monkeypatch.setattr(Grammars, "compiled", lambda *_: pytest.fail("compiled"))
    [submission] = llm.driver.submit_many([checked])
    assert all(re.fullmatch("[ab]{3}", sample.text) for sample in submission.result().samples)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (f"{STRUCTURED_FAILED}: too complex", ParametersFailed),
        (ALL_FORBIDDEN, ParametersFailed),
        (NO_CHOICE, RequestFailed),
    ],
)
def test_what_a_request_asks_for_is_its_own_error(error: str, kind: type[Exception]) -> None:
    """Catches a client's error that is reported as one of the engine, which the client would send again."""
    sample = Sample(0, "", [], "error", None, RequestMetrics())
    with pytest.raises(RequestFailed) as raised:
        check_served(RequestOutput("a", [1], [sample], error))
    assert raised.type is kind
    assert isinstance(raised.value, RequestError) == (kind is ParametersFailed)
