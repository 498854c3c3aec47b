"""The reference page of the recipe, written from the code: `python -m ndtrain.recipe.reference`."""

from collections.abc import Iterator, Mapping

from ndtrain.recipe import axolotl_keys as foreign
from ndtrain.recipe.base import RecipePart
from ndtrain.recipe.data_keys import DataKeys, DatasetSpec, InstructionMapping, PretrainingSpec
from ndtrain.recipe.explain import describe_default, expected
from ndtrain.recipe.model_keys import AdapterKeys, ModelKeys, SpecialTokens
from ndtrain.recipe.rules import RULES
from ndtrain.recipe.training_keys import (
    EvalKeys,
    LrGroup,
    MemoryKeys,
    MeshKeys,
    OptimizerKeys,
    ReportKeys,
    SaveKeys,
)

GROUPS: Mapping[str, type[RecipePart]] = {
    "Model": ModelKeys,
    "`special_tokens`": SpecialTokens,
    "Adapters": AdapterKeys,
    "Data": DataKeys,
    "One of `datasets` or `test_datasets`": DatasetSpec,
    "`type` of a dataset as a mapping": InstructionMapping,
    "One of `pretraining_dataset`": PretrainingSpec,
    "Mesh": MeshKeys,
    "Optimisation": OptimizerKeys,
    "One of `lr_groups`": LrGroup,
    "Memory and speed": MemoryKeys,
    "Saving": SaveKeys,
    "Evaluation": EvalKeys,
    "Reporting": ReportKeys,
}


def render_reference() -> str:
    """The whole page in Markdown."""
    return "\n".join(
        [
            "# Recipe reference",
            "",
            "Written from the code by `make schema`; do not edit. One key in the terminal:",
            "`ndtrain schema --field KEY`.",
            *_key_tables(),
            "",
            "## Rules between keys",
            "",
            "All of them are checked before anything heavy starts, and all problems are shown at",
            "once.",
            "",
            *(f"- {' '.join((rule.__doc__ or '').split())}" for rule in RULES),
            "",
            "## Keys of Axolotl",
            "",
            "Keys that are not in the tables above. `ndtrain validate RECIPE --from axolotl`",
            "reports a whole file.",
            *_foreign_table("Accepted with a notice: nothing to choose here", foreign.CHOSEN),
            *_foreign_table("Renamed, read with a notice", foreign.RENAMED),
            *_foreign_table("Refused: the run would be another one", foreign.UNSUPPORTED),
            *_foreign_table("Inside a dataset: accepted", foreign.DATASET_CHOSEN),
            *_foreign_table("Inside a dataset: renamed", foreign.DATASET_RENAMED),
            *_foreign_table("Inside a dataset: refused", foreign.DATASET_UNSUPPORTED),
            "",
        ]
    )


def _key_tables() -> Iterator[str]:
    for title, group in GROUPS.items():
        yield from ("", f"## {title}", "", (group.__doc__ or "").strip(), "")
        yield from ("| key | takes | default | meaning |", "|---|---|---|---|")
        for key, field in group.fields_by_key().items():
            cells = (f"`{key}`", expected(field), describe_default(field), field.description or "")
            yield f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _foreign_table(title: str, table: Mapping[str, str]) -> Iterator[str]:
    yield from ("", f"### {title}", "", "| key | here |", "|---|---|")
    for key, text in sorted(table.items()):
        yield f"| `{key}` | {_cell(text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(render_reference(), end="")
