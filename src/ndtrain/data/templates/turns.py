"""The head that templates share which know only user and assistant turns."""

OPEN_TURNS = """\
{{- bos_token }}
{%- set opening = namespace(text='') %}
{%- set turns = messages %}
{%- if messages[0].role == 'system' %}
    {%- set opening.text = messages[0].content + '\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- endif %}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
"""
"""Opens the loop over `turns`; a system text is in `opening.text`, for the first of them."""
