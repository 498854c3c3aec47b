"""`ndtrain generate MODEL`: answers prompts with a base model, a run, an export or an adapter.

A model larger than one device is split over several: every rank takes every token, the main rank
reads and prints.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch
import torch.distributed as dist

from ndtrain.data.instruction_template import is_instruction_template
from ndtrain.environment import LaunchedRank
from ndtrain.errors import ExitCode, RecipeError
from ndtrain.launch import LaunchOptions, launch
from ndtrain.model.generate import Message, Sampling, answer
from ndtrain.parallel.mesh import build_mesh
from ndtrain.parallel.runtime import Runtime, limit_waits, start, stop
from ndtrain.plan.plan import ParallelPlan
from ndtrain.train.speaker import (
    FoundSpeaker,
    Place,
    Speaker,
    find_speaker,
    load_speaker,
    own_place,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LEAVE = {"/exit", "/quit"}
_PATIENCE_SECONDS = 86_400
"""How long ranks wait for each other: one of them may be waiting for somebody who types."""


@dataclass(frozen=True)
class AnswerJob:
    """What every rank gets.

    Attributes:
        conversations: to answer one after the other.
        chat: then read turns from standard input.
        raw: take prompts as they are.
        tp: ranks that share the model.
    """

    found: FoundSpeaker
    conversations: tuple[Sequence[Message], ...]
    sampling: Sampling
    chat: bool
    raw: bool
    tp: int


def generate(
    model: str,
    *,
    prompt: Sequence[str],
    prompts: Path | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    chat: bool,
    raw: bool = False,
    tensor_parallel_size: int = 1,
) -> int:
    """Print an answer to each prompt, or talk.

    Args:
        model: folder, hub id, .gguf file, package:// address, run, checkpoint or adapter.
        prompt: prompts from the command line.
        prompts: a file with one a line, or .jsonl with `prompt` or `messages`.
        max_new_tokens: longest answer.
        temperature: 0 = the likeliest token.
        top_p: nucleus sampling.
        seed: of sampling.
        chat: read turns from standard input.
        raw: take prompts as they are, without template or instruction form.
        tensor_parallel_size: processes, each with a device of its own, that share the model.

    Raises:
        RecipeError: there is nothing to answer.
        MeshError: the model cannot be found or loaded.
    """
    conversations = [[{"role": "user", "content": text}] for text in prompt]
    if prompts is not None:
        conversations += read_prompts(prompts)
    if not conversations and not chat:
        raise RecipeError(
            "there is nothing to answer.",
            where="--prompt",
            hint='Give --prompt "...", --prompts FILE or --chat.',
        )
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    if raw and chat:
        raise RecipeError(
            "turns need a template.", where="--raw", hint="Leave out --raw or --chat."
        )
    job = AnswerJob(
        find_speaker(model), tuple(conversations), sampling, chat, raw, tensor_parallel_size
    )
    with tempfile.TemporaryDirectory(prefix="ndtrain-generate-") as logs:
        options = LaunchOptions(
            world_size=job.tp, run_dir=Path(logs), timeout_seconds=_PATIENCE_SECONDS
        )
        return launch(job, answer_rank, options)


def answer_rank(job: AnswerJob, launched: LaunchedRank | None) -> int:
    """One rank from loading the model to the last answer."""
    if launched is None:
        _answer_all(job, load_speaker(job.found, own_place()), sys.stdin)
        return ExitCode.OK
    runtime = start(launched, timeout_seconds=_PATIENCE_SECONDS)
    failed = True
    try:
        mesh = build_mesh(ParallelPlan(tp=job.tp), runtime.device)
        limit_waits(runtime)
        dtype = torch.bfloat16 if runtime.device.type == "cuda" else torch.float32
        speaker = load_speaker(job.found, Place(runtime.device, dtype, mesh.tp))
        # a started process has another sys.stdin; the terminal or pipe is still there
        with open(0, encoding="utf-8", closefd=False) as typed:
            _answer_all(job, speaker, typed, runtime)
        failed = False
    finally:
        stop(runtime, failed=failed)
    return ExitCode.OK


def _answer_all(
    job: AnswerJob, speaker: Speaker, typed: TextIO, runtime: Runtime | None = None
) -> None:
    if job.raw:
        speaker.tokenizer.chat_template = None
    if runtime is None or runtime.is_main:
        print(_describe_prompts(speaker.tokenizer, raw=job.raw), file=sys.stderr, flush=True)
    cut_off = 0
    for number, messages in enumerate(job.conversations):
        if len(job.conversations) > 1:
            print(f"{'' if number == 0 else chr(10)}> {messages[-1]['content']}")
        told = answer(speaker.model, speaker.tokenizer, messages, job.sampling, _print_piece)
        cut_off += told.is_cut_off
        print(flush=True)
    if cut_off and (runtime is None or runtime.is_main):
        print(_describe_cuts(cut_off, job), file=sys.stderr, flush=True)
    if job.chat:
        _talk(speaker, job.sampling, _turns(speaker.name, typed, runtime))


def _describe_prompts(tokenizer: "PreTrainedTokenizerBase", *, raw: bool) -> str:
    """What a prompt is put into before the model sees it."""
    if raw:
        return "Prompts go to the model as they are."
    if tokenizer.chat_template is None:
        return "Prompts go to the model as they are: its tokenizer has no chat template."
    if is_instruction_template(tokenizer.chat_template):
        form = "the instruction form of the rows it was trained on"
    else:
        form = "its chat template"
    return f"Prompts go to the model in {form}; --raw leaves them as they are."


def _describe_cuts(cut_off: int, job: AnswerJob) -> str:
    """How many answers are longer than what is shown."""
    total, longest = len(job.conversations), job.sampling.max_new_tokens
    which = "The answer was" if total == 1 else f"{cut_off} of {total} answers were"
    return f"{which} cut off after {longest} tokens; --max-new-tokens allows more."


def read_prompts(path: Path) -> list[list[dict[str, str]]]:
    """The conversations in a file: lines of text, or of JSON when it ends in .jsonl.

    Raises:
        RecipeError: the file is missing or a line is broken.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecipeError(f"the prompts cannot be read: {reason}.", where=str(path)) from error
    conversations: list[list[dict[str, str]]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            conversations.append([{"role": "user", "content": line}])
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            place = getattr(error, "pos", 0)
            cut = place >= len(line.rstrip()) or str(error).startswith("Unterminated string")
            what = "it is cut off" if cut else str(error)
            raise RecipeError(
                f"the line is not valid JSON: {what}.",
                where=f"{path}:{number}",
                hint="Each line is one JSON object with `prompt` or `messages`.",
            ) from error
        try:
            turns = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
            conversations.append(
                [{"role": str(one["role"]), "content": str(one["content"])} for one in turns]
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise RecipeError(
                "a line of prompts is a JSON object with `prompt` or `messages`.",
                where=f"{path}:{number}",
            ) from error
    return conversations


def _talk(speaker: Speaker, sampling: Sampling, typed: Iterator[str]) -> None:
    turns: list[Message] = []
    for line in typed:
        turns.append({"role": "user", "content": line})
        told = answer(speaker.model, speaker.tokenizer, turns, sampling, _print_piece)
        print(" …" if told.is_cut_off else "")
        turns.append({"role": "assistant", "content": told.text})


def _turns(name: str, typed: TextIO, runtime: Runtime | None) -> Iterator[str]:
    """What the user says, on every rank, until the input ends or says /exit."""
    asks = typed.isatty() and (runtime is None or runtime.is_main)
    if asks:
        print(f"Talking with {name}. /exit leaves.", file=sys.stderr)
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        line = _next_line(typed, runtime)
        if not line or line.strip() in _LEAVE:
            return
        if line.strip():
            yield line.rstrip("\n")


def _next_line(typed: TextIO, runtime: Runtime | None) -> str:
    if runtime is None:
        return typed.readline()
    told = [typed.readline() if runtime.is_main else ""]
    dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
    return told[0]


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)
