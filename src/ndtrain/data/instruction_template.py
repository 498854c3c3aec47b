"""The prompt of instruction rows as a chat template, so that a model is asked as it was trained.

Such rows have no turns and need no template to train. Whoever asks the model afterwards has turns:
the text around the instruction is learned from the format's own reader and written as a template,
which goes with the tokenizer into the export.
"""

import json
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ndtrain.data.formats.catalog import find_format
from ndtrain.data.formats.instruction import read_alpaca, read_mapped
from ndtrain.data.rows import Row
from ndtrain.data.sample import Passage
from ndtrain.data.tokens import TextEncoder
from ndtrain.recipe.schema import DatasetSpec, InstructionMapping

_OPENING = "{#- instruction form -#}\n"
_INSTRUCTION, _SYSTEM = "\ue000", "\ue001"
"""Private characters in the places of the two texts; no layout holds them."""


def instruction_template(
    datasets: Sequence[DatasetSpec], tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """A template that gives the prompts of these datasets; None unless all have the same prompt.

    Args:
        datasets: of a run.
        tokenizer: whose start tokens stand before a row.
    """
    prompts = {_prompts(spec) for spec in datasets}
    if len(prompts) != 1 or (found := prompts.pop()) is None:
        return None
    plain, with_system = (_expression(prompt) for prompt in found)
    start = "".join(tokenizer.convert_ids_to_tokens(TextEncoder(tokenizer).starts))
    return f"""{_OPENING}\
{{{{- {json.dumps(start)} }}}}
{{%- set opening = namespace(system='') %}}
{{%- for message in messages %}}
    {{%- if message.role == 'system' %}}
        {{%- set opening.system = message.content %}}
    {{%- elif message.role == 'user' and opening.system %}}
        {{{{- {with_system} }}}}
        {{%- set opening.system = '' %}}
    {{%- elif message.role == 'user' %}}
        {{{{- {plain} }}}}
    {{%- else %}}
        {{{{- message.content + eos_token }}}}
    {{%- endif %}}
{{%- endfor %}}
"""


def is_instruction_template(template: str | None) -> bool:
    """Whether a tokenizer's chat template is the prompt of instruction rows."""
    return template is not None and template.startswith(_OPENING)


def _prompts(spec: DatasetSpec) -> tuple[str, str] | None:
    """The prompt without and with a system text, None for rows that are no instructions."""
    read = find_format(spec)
    if read not in (read_alpaca, read_mapped):
        return None
    names = (
        spec.type
        if isinstance(spec.type, InstructionMapping)
        else InstructionMapping.model_validate({})
    )
    row = {names.field_instruction: _INSTRUCTION, names.field_output: "answer"}
    texts = []
    for columns in (row, {**row, names.field_system: _SYSTEM}):
        sample = read(Row(spec.path, columns), spec)
        assert isinstance(sample, Passage)
        texts.append(sample.segments[0].text)
    return texts[0], texts[1]


def _expression(prompt: str) -> str:
    """A prompt as an expression of the template's language, which reads strings as JSON does."""
    quoted = json.dumps(prompt, ensure_ascii=False)
    for mark, value in ((_INSTRUCTION, "message.content"), (_SYSTEM, "opening.system")):
        quoted = quoted.replace(mark, f'" + {value} + "')
    return quoted
