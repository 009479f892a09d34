"""What every client does with a server: `python sessions.py CLIENT URL MODEL`. Imports nothing of ssd.

The model is a bundled one: its texts mean nothing, but a forced call is a call and structured output is valid.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

Days = Literal[1, 2, 3]
LONG = 256  # tokens, enough for a call or a structured answer with white space
SHORT = {"stop": ["i"]}  # a letter that no call has: a model that has learned little does not end its text soon
ASK = "What is the weather in Rome?"


class City(BaseModel, extra="forbid"):
    """A city."""

    name: Literal["Rome", "Oslo"]
    days: Days


class Weather(BaseModel, extra="forbid"):
    """The weather of the next days."""

    days: Days


def get_weather(days: Days) -> str:
    """The weather of the next days."""
    return f"sunny for {days} days"


def openai_client(url: str, model: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": ASK}]
    tool = openai.pydantic_function_tool(City, name="get_weather")
    options: dict[str, Any] = {
        "metadata": {"run": "1"},
        "prompt_cache_key": "key",
        "safety_identifier": "me",
        "service_tier": "auto",
        "store": False,
    }
    more = {"reasoning_effort": "low", "verbosity": "medium", "modalities": ["text"], "parallel_tool_calls": True}
    chat = client.chat.completions
    chat.create(model=model, messages=messages, max_completion_tokens=8, **options, **more)
    usage = {"include_usage": True, "include_obfuscation": False}
    assert list(chat.create(model=model, messages=messages, max_tokens=8, stream=True, stream_options=usage))[-1].usage
    parsed = chat.parse(model=model, messages=messages, response_format=City, max_tokens=LONG)
    assert parsed.choices[0].message.parsed.days > 0
    called = chat.create(
        model=model, messages=messages, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=LONG
    )
    call = called.choices[0].message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    chat.create(model=model, messages=[*messages, called.choices[0].message, result], tools=[tool], max_tokens=8)
    client.completions.create(model=model, prompt="Once", max_tokens=8, best_of=1, suffix=None, user="me")

    responses = client.responses
    reasoning: Any = {"effort": "low", "summary": "auto"}
    answer = responses.create(
        model=model,
        input=ASK,
        max_output_tokens=8,
        include=["reasoning.encrypted_content"],
        reasoning=reasoning,
        truncation="disabled",
        top_logprobs=0,
        **options,
    )
    responses.create(model=model, input=[*answer.output, {"role": "user", "content": ASK}], max_output_tokens=8)
    assert responses.parse(model=model, input=ASK, text_format=City, max_output_tokens=LONG).output_parsed.days > 0
    text: Any = {"verbosity": "medium"}
    with responses.stream(model=model, input=ASK, text=text, extra_body=SHORT) as stream:
        assert stream.get_final_response().usage.output_tokens > 0


def openai_agents(url: str, model: str) -> None:
    asyncio.run(_openai_agents(url, model))


async def _openai_agents(url: str, model: str) -> None:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    calls: list[int] = []

    @agents.function_tool
    def get_weather(days: Days) -> str:
        """The weather of the next days."""
        calls.append(days)
        return f"sunny for {days} days"

    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        served = kind(model=model, openai_client=client)
        forced = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, extra_body=SHORT)
        agent: Any = agents.Agent(
            "weather", instructions="Use the tool.", model=served, tools=[get_weather], model_settings=forced
        )
        calls.clear()
        result = await agents.Runner.run(agent, ASK)
        assert calls, "the tool was not called"
        assert isinstance(result.final_output, str)
        history: Any = [*result.to_input_list(), {"role": "user", "content": "And tomorrow?"}]
        settings = agents.ModelSettings(store=False, extra_body=SHORT)
        await agents.Runner.run(agents.Agent("plain", model=served, model_settings=settings), history)
        typed: Any = agents.Agent("typed", model=served, tools=[get_weather], output_type=City)
        assert (await agents.Runner.run(typed, ASK)).final_output.days > 0
        run = agents.Runner.run_streamed(agent, ASK)
        assert "run_item_stream_event" in [event.type async for event in run.stream_events()]


def anthropic_client(url: str, model: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": ASK}]
    tool: Any = {"name": "get_weather", "description": "Weather", "input_schema": City.model_json_schema()}
    create = client.messages.create
    create(model=model, messages=messages, max_tokens=8, system="Be brief.", metadata={"user_id": "me"})
    create(model=model, messages=messages, max_tokens=8, thinking={"type": "adaptive"}, service_tier="auto")
    create(model=model, messages=messages, max_tokens=2048, thinking={"type": "enabled", "budget_tokens": 1024})
    client.messages.count_tokens(model=model, messages=messages, tools=[tool])
    called = create(model=model, messages=messages, max_tokens=LONG, tools=[tool], tool_choice={"type": "any"})
    [use, *_] = called.content
    assert use.type == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*messages, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(model=model, messages=turns, max_tokens=8, tools=[tool]) as stream:
        assert stream.get_final_message().usage.output_tokens > 0
    parsed = client.messages.parse(model=model, messages=messages, max_tokens=LONG, output_format=City)
    assert parsed.parsed_output.days > 0
    edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    client.beta.messages.create(
        model=model,
        messages=messages,
        max_tokens=8,
        betas=["context-management-2025-06-27"],
        context_management=edits,
        output_config={"effort": "high"},
        cache_control={"type": "ephemeral"},
    )


def langchain(chat: Any, weather: Any, **structured: Any) -> None:
    """A chat, a stream, a tool and a structured answer.

    `weather`: the tool's JSON; of a function, langchain would leave out that there are no other arguments.
    """
    from langchain_core.messages import HumanMessage, ToolMessage

    chat.invoke([("system", "Be brief."), ("human", ASK)])
    assert list(chat.stream(ASK))
    bound = chat.bind_tools([weather], tool_choice="any")
    called = bound.invoke(ASK)
    [call, *_] = called.tool_calls
    result = ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
    others = [ToolMessage("", tool_call_id=other["id"]) for other in called.tool_calls[1:]]
    chat.bind_tools([weather]).invoke([HumanMessage(ASK), called, result, *others])
    assert chat.with_structured_output(City, **structured).invoke(ASK).days > 0


def langchain_openai(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    weather = {"type": "function", "function": {"name": "get_weather", "parameters": Weather.model_json_schema()}}
    options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "max_tokens": LONG}
    langchain(ChatOpenAI(model=model, temperature=0.5, **options), weather)
    langchain(ChatOpenAI(model=model, use_responses_api=True, **options), weather, method="json_schema")
    langchain(
        ChatOpenAI(model=model, reasoning_effort="low", **options), weather, method="function_calling", strict=True
    )


def langchain_anthropic(url: str, model: str) -> None:
    from langchain_anthropic import ChatAnthropic

    options: dict[str, Any] = {"base_url": url, "api_key": "none", "max_retries": 0, "max_tokens": LONG}
    weather = {"name": "get_weather", "description": "The weather.", "input_schema": Weather.model_json_schema()}
    langchain(ChatAnthropic(model=model, **options), weather, method="json_schema")


def pydantic_ai(url: str, model: str) -> None:
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    for served in (OpenAIChatModel(model, provider=openai), OpenAIResponsesModel(model, provider=openai)):
        agent = pydantic_ai.Agent(
            served, instructions="Be brief.", tools=[get_weather], model_settings={"max_tokens": LONG}
        )
        agent.run_sync(ASK)
        typed = pydantic_ai.Agent(served, output_type=City, model_settings={"max_tokens": LONG})
        result = typed.run_sync(ASK)
        assert result.output.days > 0
        typed.run_sync("And tomorrow?", message_history=result.all_messages())
        native = pydantic_ai.Agent(
            served, output_type=pydantic_ai.NativeOutput(City), model_settings={"max_tokens": LONG}
        )
        assert native.run_sync(ASK).output.days > 0

        async def streamed(agent: Any = agent) -> str:
            async with agent.run_stream(ASK) as run:
                return str(await run.get_output())

        asyncio.run(streamed())


def instructor_client(url: str, model: str) -> None:
    import anthropic
    import instructor
    import openai

    messages: list[Any] = [{"role": "user", "content": ASK}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        chat = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
        assert chat.create(model=model, messages=messages, response_model=City, max_tokens=LONG, max_retries=0).days > 0
    claude = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))
    assert claude.create(model=model, messages=messages, response_model=City, max_tokens=LONG, max_retries=0).days > 0


def litellm_client(url: str, model: str) -> None:
    import litellm

    messages: list[Any] = [{"role": "user", "content": ASK}]
    function = {"name": "get_weather", "parameters": City.model_json_schema()}
    tools = [{"type": "function", "function": function}]
    for name, base in ((f"openai/{model}", f"{url}/v1"), (f"anthropic/{model}", url)):
        options: dict[str, Any] = {"model": name, "api_base": base, "api_key": "none", "num_retries": 0}
        options |= {"messages": messages}
        litellm.completion(**options, max_tokens=8, user="me")
        assert list(litellm.completion(**options, max_tokens=8, stream=True, stream_options={"include_usage": True}))
        called = litellm.completion(**options, max_tokens=LONG, tools=tools, tool_choice="required")
        message = called.choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
        assert results
        options["messages"] = [*messages, message, *results]
        litellm.completion(**options, max_tokens=8, tools=tools)
    options = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    litellm.responses(**options, input=ASK, max_output_tokens=8)
    try:
        litellm.completion(**options, messages=[{"role": "user", "content": "word " * 9000}], max_tokens=8)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("a prompt that is too long was not recognised")


def ollama_client(url: str, model: str) -> None:
    import ollama

    client = ollama.Client(host=url)
    assert [each.model for each in client.list().models] == [model]
    assert client.show(model).modelinfo
    assert client.ps().models
    options = {"temperature": 0.5, "num_predict": 8, "num_ctx": 2048, "seed": 1, **SHORT}
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
    client.chat(model, messages, options=options, keep_alive="5m")
    assert list(client.chat(model, messages, options=options, think=False, stream=True))[-1].done
    call = {"function": {"name": "get_weather", "arguments": {"days": 2}}}
    turn = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    turn += [{"role": "tool", "tool_name": "get_weather", "content": "sunny"}]
    weather = {"name": "get_weather", "description": "The weather.", "parameters": Weather.model_json_schema()}
    tools = [{"type": "function", "function": weather}]
    client.chat(model, [*messages, *turn], tools=tools, options=options)
    form: Any = {"format": City.model_json_schema(), "options": {"num_predict": LONG}}
    City.model_validate_json(client.chat(model, messages, **form).message.content)
    client.generate(model, ASK, system="Be brief.", options=options)
    assert list(client.generate(model, ASK, raw=True, options=options, stream=True))[-1].done
    assert len(client.embed(model, ["one", "two"]).embeddings) == 2
    client.generate(model)  # loads it


def langchain_ollama(url: str, model: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM

    weather = {"type": "function", "function": {"name": "get_weather", "parameters": Weather.model_json_schema()}}
    chat = ChatOllama(model=model, base_url=url, num_predict=8, temperature=0.5, **SHORT)
    answer = chat.invoke([("system", "Be brief."), ("human", ASK)])
    assert answer.usage_metadata["output_tokens"] > 0
    assert list(chat.stream(ASK))
    bound = chat.bind_tools([weather])
    answer = bound.invoke(ASK)
    answer.tool_calls = [{"name": "get_weather", "args": {"days": 2}, "id": "1", "type": "tool_call"}]
    bound.invoke([HumanMessage(ASK), answer, ToolMessage("sunny", tool_call_id="1")])
    long = ChatOllama(model=model, base_url=url, num_predict=LONG)
    assert long.with_structured_output(City, method="json_schema").invoke(ASK).days > 0
    assert isinstance(OllamaLLM(model=model, base_url=url, num_predict=8).invoke(ASK), str)
    assert len(OllamaEmbeddings(model=model, base_url=url).embed_documents(["one", "two"])) == 2


def llm_ollama(url: str, model: str) -> None:
    """The command `llm`, whose plugin finds the models by itself."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "OLLAMA_HOST": url, "LLM_USER_PATH": home}

        def llm(*arguments: str) -> str:
            command = [sys.executable, "-m", "llm", *arguments]
            return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

        name = f"ollama/{model}"
        assert name in llm("models")
        llm("-m", name, ASK, "-o", "num_predict", "8", "-o", "temperature", "0.5", "-s", "Be brief.")
        llm("-m", name, "-c", "And tomorrow?", "-o", "num_predict", "8", "--no-stream")


SESSIONS: dict[str, Callable[[str, str], None]] = {
    "openai": openai_client,
    "openai-agents": openai_agents,
    "anthropic": anthropic_client,
    "langchain-openai": langchain_openai,
    "langchain-anthropic": langchain_anthropic,
    "pydantic-ai": pydantic_ai,
    "instructor": instructor_client,
    "litellm": litellm_client,
    "ollama": ollama_client,
    "langchain-ollama": langchain_ollama,
    "llm-ollama": llm_ollama,
}

if __name__ == "__main__":
    SESSIONS[sys.argv[1]](sys.argv[2], sys.argv[3])
