"""The templates by the name a recipe gives them.

To add one: write `TEMPLATE` in a file beside this one and name it here. Tag the text that the
model is to write with `generation` blocks: one rendering then tells what is trained.
"""

from collections.abc import Mapping

from ndtrain.data.templates import chatml, gemma, llama3, mistral, qwen

TEMPLATES: Mapping[str, str] = {
    "chatml": chatml.TEMPLATE,
    "llama3": llama3.TEMPLATE,
    "qwen": qwen.TEMPLATE,
    "gemma": gemma.TEMPLATE,
    "mistral": mistral.TEMPLATE,
}
