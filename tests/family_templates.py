"""Chat templates in the manner of GLM-4.7, DeepSeek-V3, DeepSeek-V3.1 and Kimi K2.5: what theirs do, in fewer words."""

from __future__ import annotations

from typing import Final


def _deepseek(words: str) -> str:
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


BEGIN, END, CALL, CALL_END, SEP = map(
    _deepseek, ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep")
)
USER, ASSISTANT, STOP = map(_deepseek, ("User", "Assistant", "end of sentence"))
OUTPUT, OUTPUT_END = _deepseek("tool output begin"), _deepseek("tool output end")

GLM: Final = """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>
A call: <tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>
{%- endif -%}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set last.user = loop.index0 -%}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' -%}<|user|>{{ m.content }}
{%- elif m.role == 'system' -%}<|system|>{{ m.content }}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set content, reasoning = m.content or '', '' %}
{%- if m.reasoning_content is string %}
    {%- set reasoning = m.reasoning_content %}
{%- elif '</think>' in content %}
    {%- set reasoning = ((content.split('</think>') | first).split('<think>') | last).lstrip('\\n') %}
    {%- set content = (content.split('</think>') | last).lstrip('\\n') %}
{%- endif %}
{%- if reasoning and ((clear_thinking is defined and not clear_thinking) or loop.index0 > last.user) -%}
{{ '<think>' + reasoning.strip() + '</think>' }}
{%- else -%}
{{ '</think>' }}
{%- endif %}
{{- content.strip() }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + call.function.name -}}
{% for k, v in call.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{%- endfor %}</tool_call>
{%- endfor %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif -%}
<tool_response>{{ m.content }}</tool_response>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt -%}
<|assistant|>{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif %}"""

_DEEPSEEK: Final = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(first=false, is_tool=false, system='') %}
{%- for m in messages %}
    {%- if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}{% endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{% set ns.is_tool = false %}{{ 'USER' + m['content'] }}
{%- elif m['role'] == 'assistant' and m['tool_calls'] is defined and m['tool_calls'] is not none %}
    {%- set ns.is_tool = false %}
    {{- 'ASSISTANT' + 'NO_THINKING' + (m['content'] or '') }}
    {%- for call in m['tool_calls'] %}
        {{- 'BEGIN' if loop.first else 'BETWEEN' }}{{ HEAD + call['function']['arguments'] + 'TAIL' }}
    {%- endfor %}
    {{- 'ENDSTOP' }}
{%- elif m['role'] == 'assistant' %}
    {%- set content = m['content'].split('</think>')[-1] if '</think>' in m['content'] else m['content'] %}
    {{- ('' if ns.is_tool else 'ASSISTANT' + 'NO_THINKING') + content + 'STOP' }}
    {%- set ns.is_tool = false %}
{%- elif m['role'] == 'tool' %}{% set ns.is_tool = true %}{{ 'OUTPUT' + m['content'] + 'OUTPUT_LAST' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.is_tool %}{{ 'ASSISTANT' }}{{ THINKING }}{% endif %}"""


def _filled(**parts: str) -> str:
    template = _DEEPSEEK
    common = {"ENDSTOP": END + STOP, "OUTPUT_LAST": OUTPUT_END, "OUTPUT": OUTPUT, "BEGIN": BEGIN + CALL}
    for name, text in {**parts, **common, "USER": USER, "ASSISTANT": ASSISTANT, "STOP": STOP}.items():
        template = template.replace(name, text)
    return template


# Neither describes tools: `tools` is not among the variables that they read.
DEEPSEEK_V3: Final = _filled(
    NO_THINKING="",
    HEAD=f"call['type'] + '{SEP}' + call['function']['name'] + '\\n```json\\n'",
    TAIL="\\n```" + CALL_END,
    BETWEEN="\\n" + CALL,
    THINKING="'<think>\\n'",
)
DEEPSEEK_V31: Final = _filled(
    NO_THINKING="</think>",
    HEAD=f"call['function']['name'] + '{SEP}'",
    TAIL=CALL_END,
    BETWEEN=CALL,
    THINKING="'<think>' if thinking is defined and thinking else '</think>'",
)

KIMI: Final = """{%- macro calls(message) -%}
<|tool_calls_section_begin|>
{%- for call in message['tool_calls'] -%}
<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
{%- set arguments = call['function']['arguments'] -%}
{% if arguments is string %}{{ arguments }}{% else %}{{ arguments | tojson }}{% endif %}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endmacro -%}
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{%- set role = message.get('name') or message['role'] -%}
<|im_{{ message['role'] if message['role'] in ('user', 'assistant') else 'system' }}|>{{ role }}<|im_middle|>
{%- if message['role'] == 'assistant' -%}
<think>{{ message.get('reasoning_content', '') }}</think>{{ message['content'] or '' }}
{%- if message.get('tool_calls') %}{{ calls(message) }}{% endif %}
{%- elif message['role'] == 'tool' -%}
## Return of {{ message.tool_call_id }}
{{ message['content'] }}
{%- else -%}
{{ message['content'] }}
{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>
{%- if thinking is defined and thinking is false %}<think></think>{% else %}<think>{% endif %}
{%- endif -%}"""

TEMPLATES: Final = {"glm": GLM, "deepseek_v3": DEEPSEEK_V3, "deepseek_v31": DEEPSEEK_V31, "kimi_k2": KIMI}
TAGS: Final = {
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), (BEGIN, END, CALL, CALL_END, SEP)),
    "kimi_k2": (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        "<|tool_call_argument_begin|>",
    ),
}
