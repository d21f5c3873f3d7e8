"""Chat templates in the styles that model families publish, written for these tests: every construct that such templates use."""
# ruff: noqa: E501

CHATML_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not (message.content is string and message.content.startswith('<tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

INST = """\
{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}\
{% else %}{% set rest = messages %}{% set system = false %}{% endif %}
{% for message in rest %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if loop.index0 == 0 and system %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{% endfor %}"""

DATED_HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none and messages %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call only") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

TURNS = """\
{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set prefix = messages[0]['content'] + '\\n\\n' -%}
{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<image>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}"""

DOCUMENTS = """\
{%- macro document(doc, index) -%}
Document: {{ index }}
{%- for key, value in doc | dictsort %}
{{ key }}: {{ value }}{% endfor %}
{% endmacro -%}
{%- set counter = namespace(value=0, names=[]) -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{% continue %}{%- endif -%}
{%- if loop.index > 8 -%}{% break %}{%- endif -%}
<|{{ message.role | upper }}|>{{ message.content | default('', true) | replace('\\n\\n', '\\n') }}
{%- set counter.value = counter.value + 1 -%}
{%- endfor %}
{% if documents -%}
<results>
{% for doc in documents %}{{ document(doc, loop.index0) }}{% endfor -%}
</results>{{ documents | map(attribute='title') | join(', ') }}{{ documents | selectattr('title', 'equalto', 'A') | list | length }}
{%- endif -%}
{{ counter.value }}{{ dict(a=1, b=messages|length) | tojson }}{{ "%s-%02d" | format('x', 3) }}{{ range(3) | list }}
{%- generation -%}{% set inner = 'x' %}{{ inner ~ 1 }}{%- endgeneration -%}"""

CHANNELS = """\
{%- macro type_of(spec) -%}
    {%- if spec.type == "array" -%}{{- type_of(spec['items']) + "[]" -}}
    {%- elif spec.enum -%}{{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string -%}{{- spec.type | join(" | ") -}}
    {%- elif spec.type == "object" -%}
        {{- "{" }}{%- for name, value in spec.properties.items() -%}
            {{- name + ("?" if name not in (spec.required or []) else "") + ": " -}}{{- type_of(value) -}}
            {%- if not loop.last -%}{{- ", " }}{%- endif -%}
        {%- endfor -%}{{- "}" -}}
    {%- else -%}{{- spec.type or "any" -}}{%- endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>" + (model_identity if model_identity is defined else "I am.") + "\\nReasoning: " }}
{{- (reasoning_effort | default('medium')) + "<|end|>" }}
{%- if tools -%}{{- "<|start|>developer<|message|>namespace functions {" }}
    {%- for tool in tools -%}{%- set tool = tool.function -%}
        {{- "\\n// " + (tool.description or '') + "\\ntype " + tool.name + " = (_: " }}{{- type_of(tool.parameters) }}{{- ") => any;" }}
    {%- endfor -%}{{- "\\n}<|end|>" }}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.thinking and loop.last -%}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{%- endif -%}
        {%- if "tool_calls" in message and message.tool_calls -%}
            {%- set call = message.tool_calls[0].function -%}
            {{- "<|start|>assistant to=functions." ~ call.name ~ "<|channel|>commentary json<|message|>" ~ (call.arguments|tojson) ~ "<|call|>" }}
        {%- else -%}{{- "<|start|>assistant<|channel|>final<|message|>" ~ message.content ~ "<|end|>" }}{%- endif -%}
    {%- elif message.role == 'tool' -%}{{- "<|start|>tool<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
    {%- else -%}{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

PARAMETERS = """\
{%- macro extra(spec, handled) -%}
    {%- for key in spec -%}{%- if key not in handled -%}
        {%- set value = spec[key] -%}
        {{- '\\n<' ~ key ~ '>' ~ (value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string) ~ '</' ~ key ~ '>' }}
    {%- endif -%}{%- endfor -%}
{%- endmacro -%}
{%- for tool in tools or [] -%}
    {{- "\\n<function>\\n<name>" ~ tool.function.name ~ "</name>" }}
    {%- for name, fields in (tool.function.parameters.properties or {})|items -%}
        {{- '\\n<parameter>' ~ name }}{{- extra(fields, ['description']) }}{{- '\\n</parameter>' }}
    {%- endfor -%}{{- "\\n</function>" }}
{%- endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
    {%- for call in message.tool_calls or [] -%}
        {{- '\\n<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}
        {%- for name, value in call.function.arguments|items -%}
            {{- '<parameter=' ~ name ~ '>\\n' ~ (value | tojson | safe if value is mapping or value is sequence and value is not string else value | string) ~ '\\n</parameter>\\n' }}
        {%- endfor -%}{{- '</function>\\n</tool_call>' }}
    {%- endfor -%}{{- '<|im_end|>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' }}{%- endif -%}"""

FORMATS = """\
{{ tools | tojson(ensure_ascii=True, sort_keys=True) }}|{{ messages | tojson(separators=(',', ':')) }}|{{ 'Ä<&>' | tojson }}
{% for m in messages %}  {% if loop.changed(m.role) %}{{ m.role | capitalize }}:{% endif %}
{{ loop.previtem.role if loop.previtem is defined }} {{ (m.content or '') | length }} {{ (m.content or '')[:3] ~ '…' | e }}
{% endfor %}{{ eos_token is none }}{{ messages | map(attribute='role') | unique | list }}{{ namespace(a=1).a }}{{ "a\\nb" | indent(2) }}
{{ messages | selectattr('role', 'in', ['user']) | map(attribute='content') | list | tojson }}{{ 7 // 2 }}{{ none is none }}{{ 'x' * 3 }}"""

TEMPLATES = {
    "chatml with tools and thoughts": CHATML_TOOLS,
    "turns in brackets": INST,
    "headers with a date": DATED_HEADERS,
    "turns by model": TURNS,
    "documents": DOCUMENTS,
    "channels": CHANNELS,
    "parameters between tags": PARAMETERS,
    "filters": FORMATS,
}

PARTS_ONLY = """\
{% for message in messages %}<{{ message.role }}>{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<image>{% endif %}{% endfor %}{% endfor %}"""
"""A template that knows content as a list of parts alone."""
