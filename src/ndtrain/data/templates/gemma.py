"""Gemma: the answering role is called model, and a system text opens the first user turn."""

from ndtrain.data.templates.turns import OPEN_TURNS

TEMPLATE = (
    OPEN_TURNS
    + """\
    {%- if message.role == 'assistant' %}
        {{- '<start_of_turn>model\\n' }}
        {%- if loop.first %}
            {{- opening.text }}
        {%- endif %}
        {%- generation %}
            {{- message.content | trim + '<end_of_turn>' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<start_of_turn>' + message.role + '\\n' }}
        {%- if loop.first %}
            {{- opening.text }}
        {%- endif %}
        {{- message.content | trim + '<end_of_turn>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
)
