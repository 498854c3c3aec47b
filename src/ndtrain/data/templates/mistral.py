"""Mistral: user turns between [INST] and [/INST], answers closed by the end token."""

from ndtrain.data.templates.turns import OPEN_TURNS

TEMPLATE = (
    OPEN_TURNS
    + """\
    {%- if message.role == 'user' %}
        {{- '[INST] ' }}
        {%- if loop.first %}
            {{- opening.text }}
        {%- endif %}
        {{- message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}
            {{- ' ' + message.content | trim + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- raise_exception('only system, user and assistant turns are known') }}
    {%- endif %}
{%- endfor %}
"""
)
