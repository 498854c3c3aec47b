"""How `validate` reads: lines for people and a mapping for scripts."""

from collections.abc import Iterator
from typing import Any

from ndtrain.errors import NdtrainError
from ndtrain.plan.book import book_date
from ndtrain.plan.checks import describe_batch
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.hardware import GIB, Cluster
from ndtrain.plan.plan import AXES, Plan
from ndtrain.plan.search import Candidate
from ndtrain.plan.shapes import count_parameters
from ndtrain.plan.validate import Validation
from ndtrain.recipe.schema import Recipe

_SOURCES = {
    "folder": "from its folder",
    "cache": "from the hub cache",
    "gguf": "from the GGUF file",
    "recipe": "from the recipe",
}


def describe_model(facts: ModelFacts) -> str:
    """One line on the model's sizes and where they come from."""
    source = _SOURCES.get(facts.source, f"from the book, {book_date()}")
    experts = ""
    if facts.num_experts:
        experts = f", {facts.num_experts} experts of which {facts.experts_per_token} see a token"
    return (
        f"{facts.name} ({source}): {human_count(count_parameters(facts))} parameters, "
        f"{facts.num_layers} layers, {facts.num_heads} query / {facts.num_kv_heads} key-value "
        f"heads, hidden {facts.hidden_size}, vocabulary {facts.vocab_size:,}{experts}"
    )


def describe_plan(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Lines on the mesh, the batch and how sequences are split."""
    parallel = plan.parallel
    yield f"mesh: {parallel}"
    if parallel.cp_method != "none":
        yield (
            f"context parallelism: {parallel.cp_method}, {recipe.sequence_len // parallel.cp} of "
            f"{recipe.sequence_len} tokens a rank, rows padded to a multiple of "
            f"{parallel.row_multiple}"
        )
    if parallel.sequence_parallel:
        tokens = -(-recipe.sequence_len // (parallel.cp * parallel.tp))
        travelling = ", products while they travel" if parallel.overlaps else ""
        yield (
            f"sequence parallelism: {tokens} of {recipe.sequence_len} tokens a rank outside "
            f"attention and MLP{travelling}"
        )
    yield describe_batch(plan.batch, recipe.sequence_len, packed=recipe.sample_packing)


def describe_prediction(candidate: Candidate, cluster: Cluster) -> str:
    """One line on predicted memory and speed."""
    parts = sorted(candidate.memory.gib().items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {gib:.1f}" for name, gib in parts[:4])
    return (
        f"memory: {candidate.memory.total / GIB:.1f} of {candidate.limit_gib:.1f} usable GiB on "
        f"{cluster.gpu.name} ({largest}); predicted speed "
        f"{candidate.tokens_per_second:,.0f} tokens/s"
    )


def human_count(number: float) -> str:
    """`8.03 B`, `134.5 M`, `12.3 k`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            digits = 2 if number < 100 * size else 1
            return f"{number / size:.{digits}f} {unit}"
    return str(int(number))


def count_of(number: int, one: str, many: str | None = None) -> str:
    """`1 mesh`, `2 meshes`."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def validation_json(recipe: Recipe | None, found: Validation) -> dict[str, Any]:
    """What `validate --json` prints."""
    facts, plan = found.facts, found.plan
    result: dict[str, Any] = {
        "ok": not found.problems,
        "exit_code": int(found.problems[0].exit_code) if found.problems else 0,
        "problems": [problem_json(problem) for problem in found.problems],
        "warnings": list(found.warnings),
        "notices": list(found.notices),
        "model": None,
        "mesh": None,
        "batch": None,
        "data": dict(found.data) or None,
        "memory_gib": None,
    }
    if found.predicted is not None:
        predicted = found.predicted
        result["memory_gib"] = {
            **predicted.memory.gib(),
            "total": predicted.memory.total / GIB,
            "limit": predicted.limit_gib,
        }
    if facts is not None:
        result["model"] = {**vars(facts), "parameters": count_parameters(facts)}
    if plan is not None and recipe is not None:
        batch = plan.batch
        result["mesh"] = {
            **dict(zip(AXES, plan.parallel.sizes, strict=True)),
            "cp_method": plan.parallel.cp_method,
            "sequence_parallel": plan.parallel.sequence_parallel,
            "async_tensor_parallel": plan.parallel.overlaps,
            "world_size": plan.parallel.world_size,
        }
        result["batch"] = {
            **vars(batch),
            "global_batch": batch.global_batch,
            "tokens_per_step": batch.global_batch * recipe.sequence_len,
        }
    return result


def problem_json(problem: NdtrainError) -> dict[str, Any]:
    """One problem for scripts."""
    return {
        "message": problem.message,
        "where": problem.where,
        "hint": problem.hint,
        "exit_code": int(problem.exit_code),
    }
