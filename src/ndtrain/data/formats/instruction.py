"""Instruction rows: a prompt made from columns, and the answer, which alone is trained."""

from ndtrain.data.rows import Row
from ndtrain.data.sample import Passage, Segment
from ndtrain.recipe.schema import DatasetSpec, InstructionMapping

_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)


def read_alpaca(row: Row, spec: DatasetSpec) -> Passage:
    """Columns instruction, input (optional) and output, under the Stanford Alpaca prompt."""
    instruction, given = (
        row.text("instruction", key="type: {field_instruction: ...}"),
        row.optional_text("input"),
    )
    layout = _WITH_INPUT if given else _WITHOUT_INPUT
    prompt = _fill(layout, {"instruction": instruction, "input": given})
    system = row.optional_text("system")
    if system:
        prompt = f"{system}\n\n{prompt[prompt.index('### Instruction') :]}"
    return _answered(row, prompt, "output", "type: {field_output: ...}")


def read_mapped(row: Row, spec: DatasetSpec) -> Passage:
    """Columns and layouts as the recipe's mapping names them."""
    mapping = spec.type
    assert isinstance(mapping, InstructionMapping)
    given = row.optional_text(mapping.field_input)
    layout = mapping.format if given else mapping.no_input_format
    system = row.optional_text(mapping.field_system) or _unescape(mapping.system_prompt)
    head = _fill(mapping.system_format, {"system": system}) if system else ""
    prompt = _fill(
        layout,
        {
            "instruction": row.text(mapping.field_instruction, key="field_instruction"),
            "input": given,
            "system": system,
        },
    )
    return _answered(row, head + prompt, mapping.field_output, "field_output")


def _answered(row: Row, prompt: str, column: str, key: str) -> Passage:
    """The prompt, not trained, and the answer, trained."""
    answer = row.text(column, key=key)
    if not answer:
        raise row.fail(f"column '{column}' is empty: there is nothing to train.")
    return Passage((Segment(prompt, trained=False), Segment(answer, trained=True)))


def _fill(layout: str, values: dict[str, str]) -> str:
    """Put the values in; braces in the values stay as they are."""
    pieces = []
    rest = layout
    while rest:
        places = [
            (rest.find("{" + name + "}"), name) for name in values if "{" + name + "}" in rest
        ]
        if not places:
            pieces.append(_unescape(rest))
            break
        at, name = min(places)
        pieces += [_unescape(rest[:at]), values[name]]
        rest = rest[at + len(name) + 2 :]
    return "".join(pieces)


def _unescape(layout: str) -> str:
    """A two-character backslash-n in a layout means a new line."""
    return layout.replace("\\n", "\n")
