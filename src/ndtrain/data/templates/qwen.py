"""Qwen 3: ChatML with think tags in the answer to the last question, tools and tool calls."""

TEMPLATE = """\
{%- macro call_text(call) %}
    {%- set function = call.function if call.function else call %}
    {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
    {%- if function.arguments is string %}
        {{- function.arguments }}
    {%- else %}
        {{- function.arguments | tojson }}
    {%- endif %}
    {{- '}\\n</tool_call>' }}
{%- endmacro %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- system + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and ' }}
    {{- 'arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": ' }}
    {{- '<function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(question=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set reply = message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>') %}
    {%- if last.searching and message.role == 'user' and not reply %}
        {%- set last.searching = false %}
        {%- set last.question = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if message.reasoning_content is not string and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set thought = thought.lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- set thinks = loop.index0 > last.question and (loop.last or thought) %}
        {%- set thought = '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' %}
        {%- set given = enable_thinking is defined and enable_thinking is false
            and thinks and thought == '<think>\\n\\n</think>\\n\\n' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if given %}
            {{- thought }}
        {%- endif %}
        {%- generation %}
            {%- if thinks and not given %}
                {{- thought }}
            {%- endif %}
            {{- content.lstrip('\\n') if thinks else content }}
            {%- for call in message.tool_calls or [] %}
                {%- if not loop.first or content %}
                    {{- '\\n' }}
                {%- endif %}
                {{- call_text(call) }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
