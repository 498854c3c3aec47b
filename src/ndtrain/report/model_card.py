"""The README.md of an export: what the model is, how it was made and how to load it."""

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ndtrain import __version__
from ndtrain.recipe.addresses import PACKAGE
from ndtrain.recipe.catalog import without_local_schema
from ndtrain.report.atomic import replace_text
from ndtrain.report.recorded import RecordedRun, read_run
from ndtrain.report.svg import loss_chart
from ndtrain.report.wording import change, short_count, value_change

_THIS_FOLDER = "path/to/this/folder"
_THE_RUN = "path/to/the/run"
_STEP = "training_steps"
"""Key of the header; model hubs leave those that they do not know alone."""


def write_model_card(export: Path, run_dir: Path, *, step: int, is_adapter: bool) -> None:
    """Write README.md, the loss curve and the recipe into an export.

    Args:
        export: folder of the exported weights.
        run_dir: the run they come from.
        step: of the run, after which the weights were as they are here.
        is_adapter: whether the folder holds an adapter, not a whole model.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    run = read_run(run_dir)
    run = replace(run, history=run.history.until(step))
    if run.history.steps:
        replace_text(export / "loss.svg", loss_chart(run.history, f"Loss of {run.name}") + "\n")
    replace_text(export / "README.md", render_model_card(run, step=step, is_adapter=is_adapter))
    if run.directory.recipe.exists():
        replace_text(export / "recipe.yaml", without_local_schema(run.recipe_text))


def render_model_card(run: RecordedRun, *, step: int, is_adapter: bool) -> str:
    """The card as Markdown with the header that model hubs read."""
    metadata = {**_metadata(run, is_adapter), _STEP: step}
    head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n" + "\n".join(_body(run, step, is_adapter)) + "\n"


def exported_step(export: Path) -> int | None:
    """The step of an export's weights, as its card says; None where it does not."""
    card = export / "README.md"
    if not card.is_file():
        return None
    found = re.search(rf"^{_STEP}: (\d+)$", card.read_text("utf-8", "replace"), re.MULTILINE)
    return int(found[1]) if found else None


def hub_id(name: str) -> str | None:
    """`name` when it is an `owner/name` of a model hub, None for files and packages."""
    is_address = name.count("/") == 1 and not name.startswith((".", "/", "~", "$"))
    return name if is_address and not name.endswith(".gguf") and not Path(name).exists() else None


def _metadata(run: RecordedRun, is_adapter: bool) -> dict[str, Any]:
    base = hub_id(str(run.settings.get("base_model") or ""))
    data = [
        name
        for spec in run.settings.get("datasets") or ()
        if (name := hub_id(str(spec["path"]))) and not Path(name).suffix
    ]
    metadata: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["ndtrain", *(["lora"] if is_adapter else [])],
    }
    if base:
        metadata["base_model"] = base
        metadata["base_model_relation"] = "adapter" if is_adapter else "finetune"
    if data:
        metadata["datasets"] = sorted(set(data))
    return metadata


def _body(run: RecordedRun, step: int, is_adapter: bool) -> Iterator[str]:
    kind = "An adapter for" if is_adapter else "A fine-tune of"
    yield f"# {run.settings.get('hub_model_id') or run.name}\n"
    yield f"{kind} `{run.model_name}`, trained with ndtrain {__version__}.\n"
    yield from _results(run, step)
    yield "## How to load\n"
    yield from _loading(run, is_adapter)
    yield "## Data\n"
    for spec in run.settings.get("datasets") or run.settings.get("pretraining_dataset") or ():
        yield _dataset(spec)
    yield "\n## Training\n"
    yield "| | |\n|---|---|"
    for name, value in _training(run, step):
        yield f"| {name} | {value} |"
    yield "\n## Versions\n"
    packages = run.env.get("packages", {})
    kept = [
        f"{name} {packages[name]}" for name in ("torch", "transformers", "peft") if name in packages
    ]
    yield (
        ", ".join([f"ndtrain {__version__}", f"Python {platform.python_version()}", *kept]) + ".\n"
    )
    recipe = without_local_schema(run.recipe_text).strip()
    if recipe:
        yield "<details><summary>Recipe</summary>\n"
        # A longer fence than any in the recipe.
        fence = "````" if "```" in recipe else "```"
        yield f"{fence}yaml\n{recipe}\n{fence}\n\n</details>"


def _results(run: RecordedRun, step: int) -> Iterator[str]:
    steps, evals = run.history.steps, run.history.evals
    if not steps:
        return
    yield "| loss | first | last | change |\n|---|---|---|---|"
    curves = {"held-out": evals, "training": steps}
    for name, records in curves.items():
        if records:
            yield f"| {name} | {_way(records, step)} |"
    yield "\n![Loss over the steps of training](loss.svg)\n"


def _way(records: Sequence[Mapping[str, Any]], step: int) -> str:
    """The first and the last loss as cells; a single one is compared with nothing."""
    first, last = records[0], records[-1]
    if len(records) == 1:
        return f"{first['loss']:.4f} | | measured once, at step {first['step']:,}"
    moved = change(first["loss"], last["loss"])
    # a later step may be the model's, but not measured
    until = "" if last["step"] == step else f", to step {last['step']:,}"
    return f"{first['loss']:.4f} | {last['loss']:.4f} | {moved}{until}"


def _loading(run: RecordedRun, is_adapter: bool) -> Iterator[str]:
    base = run.model_name
    if is_adapter and not run.settings.get("base_model"):
        yield (
            "This is a test: the base has random weights, drawn from the recipe's `model_config` "
            "and `seed` and stored nowhere. Only ndtrain draws them again, for the run itself:\n"
        )
        yield f'```bash\nndtrain generate {_THE_RUN} --prompt "Hello!"\n```\n'
        return
    if not is_adapter or not (base.startswith(PACKAGE) or base.lower().endswith(".gguf")):
        place = run.settings.get("hub_model_id") or _THIS_FOLDER
        yield f"```python\n{loading_code(run, place, is_adapter)}\n```\n"
        return
    yield f'```bash\nndtrain generate {_THIS_FOLDER} --prompt "Hello!"\n```\n'
    yield f"Other programs do not read `{base}` as it is. Merge the two for them:\n"
    yield f"```bash\nndtrain merge {_THIS_FOLDER} merged-model\n```\n"
    yield f"```python\n{loading_code(run, 'merged-model', is_adapter=False)}\n```\n"


def loading_code(run: RecordedRun, place: str, is_adapter: bool) -> str:
    """Python that loads the model at `place` and answers one prompt."""
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    if is_adapter:
        lines[0:0] = ["from peft import PeftModel"]
    lines += ["", f'tokenizer = AutoTokenizer.from_pretrained("{place}")']
    if is_adapter:
        lines += [
            f'base = AutoModelForCausalLM.from_pretrained("{run.model_name}")',
            f'model = PeftModel.from_pretrained(base, "{place}")',
        ]
    else:
        lines += [f'model = AutoModelForCausalLM.from_pretrained("{place}")']
    return "\n".join(
        [
            *lines,
            'messages = [{"role": "user", "content": "Hello!"}]',
            "prompt = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ")",
            "answer = model.generate(**prompt, max_new_tokens=100)",
            "print(tokenizer.decode(answer[0], skip_special_tokens=True))",
        ]
    )


def _dataset(spec: Mapping[str, Any]) -> str:
    path = str(spec["path"])
    # A path of this machine says nothing to readers of the card but the file's name.
    shown = path if hub_id(path) or "://" in path else Path(path).name
    kind = spec.get("type")
    return f"- `{shown}`" + (f" as {kind}" if isinstance(kind, str) else "")


def _training(run: RecordedRun, step: int) -> Iterator[tuple[str, str]]:
    settings = run.settings
    adapter = settings.get("adapter")
    rank = f", rank {settings['lora_r']}, alpha {settings['lora_alpha']:g}" if adapter else ""
    yield "method", f"{adapter or 'full fine-tuning'}{rank}"
    if run.parallel:
        yield "mesh", str(run.parallel)
    if run.plan.get("global_batch"):
        yield "rows a step", str(run.plan["global_batch"])
    for name, key in (
        ("longest row in tokens", "sequence_len"),
        ("packed", "sample_packing"),
        ("epochs", "num_epochs"),
        ("learning rate", "learning_rate"),
        ("schedule", "lr_scheduler"),
        ("optimizer", "optimizer"),
        ("seed", "seed"),
    ):
        if key in settings:
            yield name, str(settings[key])
    for after, changed in run.history.changes().items():
        told = (value_change(key, **values) for key, values in changed.items())
        # a bar would end the cell
        yield f"changed after step {after:,}", "; ".join(told).replace("|", "\\|")
    yield "steps", f"{step:,}"
    if run.history.steps and run.history.steps[-1]["step"] == step:
        yield "trained tokens", short_count(run.history.steps[-1]["seen_tokens"])
