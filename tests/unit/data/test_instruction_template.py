"""A model trained on instruction rows is asked with exactly the tokens of such a row."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ndtrain.data.batch import IGNORED
from ndtrain.data.instruction_template import instruction_template, is_instruction_template
from ndtrain.data.prepare import Prepared
from ndtrain.model.generate import encode_prompt
from ndtrain.recipe.schema import DatasetSpec

MAPPING = {
    "field_instruction": "question",
    "field_output": "reply",
    "field_system": "about",
    "system_format": "[{system}]\\n",
    "no_input_format": 'Q "{instruction}"\\nA: ',
}
ASKED = "Say {instruction} \\n 'twice' \u00e4"


@pytest.mark.parametrize("system", ["", "Be \u00fcber short."])
@pytest.mark.parametrize("kind", ["alpaca", MAPPING])
@pytest.mark.parametrize("tokenizer_name", ["byte_tokenizer", "smollm_tokenizer"])
def test_the_prompt_has_the_tokens_of_a_row(
    kind: Any,
    system: str,
    tokenizer_name: str,
    request: pytest.FixtureRequest,
    prepare_rows: Callable[..., Prepared],
) -> None:
    tokenizer: PreTrainedTokenizerBase = request.getfixturevalue(tokenizer_name)
    names = {"field_instruction": "instruction", "field_output": "output", "field_system": "system"}
    if isinstance(kind, dict):
        names = kind
    row = {names["field_instruction"]: ASKED, names["field_output"]: "Yes."}
    messages = [{"role": "user", "content": ASKED}]
    if system:
        row[names["field_system"]] = system
        messages.insert(0, {"role": "system", "content": system})
    ids, labels = prepare_rows([row], kind, tokenizer=tokenizer).train.row(0)
    kept = tokenizer.chat_template
    try:
        tokenizer.chat_template = instruction_template(
            [DatasetSpec(path="x", type=kind)], tokenizer
        )
        assert is_instruction_template(tokenizer.chat_template)
        assert encode_prompt(tokenizer, messages)[0].tolist() == ids[labels == IGNORED].tolist()
    finally:
        tokenizer.chat_template = kept


@pytest.mark.parametrize(
    "kinds",
    [[], ["chat_template"], ["completion"], ["alpaca", "chat_template"], ["alpaca", MAPPING]],
)
def test_rows_of_another_or_of_several_kinds_have_no_instruction_form(
    kinds: list[Any], byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    specs = [DatasetSpec(path=str(number), type=kind) for number, kind in enumerate(kinds)]
    assert instruction_template(specs, byte_tokenizer) is None
    assert not is_instruction_template(byte_tokenizer.chat_template)
