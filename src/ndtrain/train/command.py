"""`ndtrain train`: everything that is decided and prepared before any rank exists."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ndtrain.data.report import rows_notes
from ndtrain.environment import LaunchedRank, launched_rank, no_color
from ndtrain.errors import ExitCode, MeshError, OutOfMemoryError, RecipeError
from ndtrain.launch import LaunchOptions, launch
from ndtrain.launch.imports import without_collection
from ndtrain.launch.status import choose_run_id
from ndtrain.plan.decide import decide
from ndtrain.plan.machines import machines_here
from ndtrain.plan.measured import device_name
from ndtrain.plan.model_facts import facts_of_source
from ndtrain.plan.model_source import ModelSource, find_model
from ndtrain.plan.own_run import predict_own_run
from ndtrain.plan.plan import Plan, ranks_per_node
from ndtrain.plan.validate import ranks_to_start
from ndtrain.recipe.load import LoadedRecipe, load_recipe
from ndtrain.recipe.schema import Recipe
from ndtrain.report.run_directory import RunDirectory
from ndtrain.report.run_lock import hold_folder
from ndtrain.report.trackers import check_trackers
from ndtrain.train.finished import FinishedRun, already_past
from ndtrain.train.job import Job
from ndtrain.train.row_lengths import row_lengths

if TYPE_CHECKING:
    from ndtrain.data.prepare import Prepared


def train(
    recipe: Path,
    *,
    overrides: Sequence[str] = (),
    nproc_per_node: int | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    rdzv_endpoint: str | None = None,
    resume: str = "auto",
    restart: bool = False,
    dry_run: bool = False,
    max_steps: int | None = None,
    max_seconds: float | None = None,
    max_restarts: int = 0,
    sweep: Path | None = None,
    debug: bool = False,
) -> int:
    """Run the recipe; returns the exit code.

    Args:
        recipe: the recipe's file.
        overrides: `--set` values.
        nproc_per_node: ranks on this machine; None: what the sizes ask for.
        nnodes: number of machines that run this command.
        node_rank: number of this machine.
        rdzv_endpoint: host and port of machine 0.
        resume: `auto`, `never` or a checkpoint.
        restart: move an earlier run aside.
        dry_run: print the plan and stop.
        max_steps: last step of this start.
        max_seconds: longest time of this start.
        max_restarts: restarts after a lost rank.
        sweep: file of value sets, one run each.
        debug: let errors keep their tracebacks.

    Raises:
        NdtrainError: whatever is wrong, with its exit code.
    """
    if sweep is not None:
        from ndtrain.train.sweep import run_sweep

        if nnodes > 1 or resume not in ("auto", "never"):
            raise RecipeError(
                "a sweep runs on one machine, and each of its runs has its own checkpoints.",
                where="--sweep",
                hint="Leave out --nnodes and a path to resume from.",
            )
        words = ["--resume", resume, *(["--restart"] if restart else [])]
        words += ["--max-restarts", str(max_restarts)]
        for name, number in (("--nproc-per-node", nproc_per_node), ("--max-steps", max_steps)):
            words += [] if number is None else [name, str(number)]
        return run_sweep(
            recipe,
            sweep,
            overrides,
            options=words,
            max_seconds=max_seconds,
            dry_run=dry_run,
            debug=debug,
        )
    loaded = load_recipe(recipe, overrides)
    launched = launched_rank()
    restarted = launched is not None and launched.attempt > 0
    if restarted:
        # a launcher's second attempt continues the first one, which has moved an older run aside
        restart, resume = False, "auto" if resume == "never" else resume
    source = find_model(loaded.recipe, where=loaded.position("base_model"))
    plan = make_plan(loaded, source, launched, nproc_per_node, nnodes)
    run_dir = RunDirectory(run_folder(loaded))
    if dry_run:
        print_plan(loaded, plan, run_dir)
        return ExitCode.OK
    check_trackers(loaded.recipe)
    # one process of the whole run writes the run directory
    leads = node_rank == 0 if launched is None else launched.rank == 0
    with _turn(run_dir, restart=restart) if leads else nullcontext():
        finished = FinishedRun.find(run_dir, loaded.recipe)
        if finished is not None and not finished.changes and resume == "auto":
            print(finished)
            return ExitCode.OK
        past = already_past(run_dir, loaded.recipe, resume, max_steps, restarted=restarted)
        if past is not None:
            print(past)
            return ExitCode.OK
        if leads:
            _tell_torch(loaded.recipe)
        rows = prepare_rows(loaded, plan, source, leads=leads)
        if (
            finished is not None
            and resume == "auto"
            and finished.has_nothing_left(loaded.recipe, plan, rows.prepared.report)
        ):
            print(finished)
            return ExitCode.OK
        job = prepare_job(
            loaded,
            plan,
            rows,
            run_dir,
            leads=leads,
            fresh=restart or resume == "never",
            resume=resume,
            stop_after=max_steps,
            max_seconds=max_seconds,
            nodes=nnodes,
        )
        options = LaunchOptions(
            world_size=plan.parallel.world_size,
            run_dir=run_dir.path,
            device=loaded.recipe.device,
            max_restarts=max_restarts,
            timeout_seconds=loaded.recipe.ddp_timeout,
            num_nodes=nnodes,
            node_rank=node_rank,
            endpoint=rdzv_endpoint,
        )
        # imported before the ranks are forked, so that all of them share one import
        with without_collection():
            from ndtrain.train.memory_failure import explain_launch
            from ndtrain.train.run import run_rank

        try:
            return launch(job, run_rank, options)
        except OutOfMemoryError as error:
            raise explain_launch(job, error) from error


@contextmanager
def _turn(run_dir: RunDirectory, *, restart: bool) -> Iterator[None]:
    """The run directory for this run alone; an older run is moved aside for a restart."""
    if restart and run_dir.path.is_dir():
        with hold_folder(run_dir.path):
            run_dir.set_aside()
    run_dir.create()
    with hold_folder(run_dir.path):
        yield


def _tell_torch(recipe: Recipe) -> None:
    """The first line of a run: whether the right torch has found the right devices."""
    with without_collection():
        import torch

    # neither starts CUDA here, where ranks are still to be forked
    here = torch.cuda.device_count() if recipe.device != "cpu" else 0
    place = f"{here} × {device_name(on_gpu=True)}" if here else "CPU"
    print(f"start  torch {torch.__version__} on {place}", flush=True)


def run_folder(loaded: LoadedRecipe) -> Path:
    """Where the run lives: `output_dir`, else `runs/<recipe name>`."""
    if loaded.recipe.output_dir is not None:
        return Path(loaded.recipe.output_dir).expanduser()
    return Path("runs") / loaded.path.stem


def make_plan(
    loaded: LoadedRecipe,
    source: ModelSource,
    launched: LaunchedRank | None,
    nproc_per_node: int | None,
    nnodes: int,
) -> Plan:
    """The mesh and batch of this start.

    Raises:
        MeshError: the sizes do not multiply to the ranks there are, or these cannot be dealt to
            the machines.
    """
    recipe = loaded.recipe
    if launched is not None:
        world_size: int | None = launched.world_size
        if nproc_per_node is not None and nproc_per_node != launched.local_world_size:
            raise MeshError(
                f"--nproc-per-node is {nproc_per_node}, but {launched.launcher} started "
                f"{launched.local_world_size} ranks on this machine.",
                where="--nproc-per-node",
                hint="Leave the option away inside a launcher.",
            )
    elif nproc_per_node is not None:
        world_size = nproc_per_node * nnodes
    else:
        world_size = ranks_to_start(recipe, machines_here())
    plan = decide(
        recipe,
        facts_of_source(source, where=loaded.position("base_model")),
        world_size=world_size,
        where=loaded.position,
    )
    ranks_per_node(plan.parallel.world_size, nnodes, option="--nnodes")
    return plan


@dataclass(frozen=True)
class ReadyRows:
    """Model and rows on this machine's disk.

    Attributes:
        num_tokens: size of the tokenizer.
    """

    source: ModelSource
    num_tokens: int
    prepared: "Prepared"


def prepare_rows(
    loaded: LoadedRecipe, plan: Plan, source: ModelSource, *, leads: bool
) -> ReadyRows:
    """Model and rows ready on disk, before any process group; the run directory is not touched.

    Raises:
        DataError: a row is broken, or nothing is left to train on.
        MeshError: the model cannot be fetched.
    """
    recipe = loaded.recipe
    with without_collection():
        from rich.console import Console

        from ndtrain.data.prepare import prepare
        from ndtrain.data.progress import progress_bar
        from ndtrain.model.ready import ready_model
        from ndtrain.model.tokenizer import load_tokenizer, tokenizer_key

    ready = ready_model(source, trust_remote_code=recipe.trust_remote_code)
    tokenizer = load_tokenizer(ready, recipe)
    # on a terminal, one process of the run shows how far the rows are
    console = Console(no_color=no_color() or None) if leads else None
    with progress_bar(console) as tell:
        prepared = prepare(
            loaded,
            tokenizer,
            tokenizer_key(tokenizer),
            data_ranks=plan.parallel.data_ranks,
            on_progress=tell,
        )
    return ReadyRows(ready, len(tokenizer), prepared)


def prepare_job(
    loaded: LoadedRecipe,
    plan: Plan,
    rows: ReadyRows,
    run_dir: RunDirectory,
    *,
    leads: bool,
    fresh: bool,
    resume: str,
    stop_after: int | None,
    max_seconds: float | None,
    nodes: int = 1,
) -> Job:
    """What the ranks get; one process fills the run directory.

    Raises:
        CheckpointError: the run directory cannot be written.
    """
    recipe, report = loaded.recipe, rows.prepared.report
    run_id = choose_run_id(run_dir.status, fresh=fresh)
    prediction = predict_own_run(recipe, plan, nodes=nodes, rows=row_lengths(report, recipe))
    if leads:
        run_dir.write_recipe(loaded.text)
        run_dir.write_resolved(recipe, loaded.origins)
        run_dir.write_plan(plan, extra=prediction.to_json() if prediction else {})
        run_dir.write_data(report)
        run_dir.write_env()
    return Job(
        loaded=loaded,
        plan=plan,
        source=rows.source,
        run_dir=run_dir,
        run_id=run_id,
        prepared=rows.prepared.path,
        num_tokens=rows.num_tokens,
        resume=resume,
        stop_after=stop_after,
        max_seconds=max_seconds,
        notices=rows_notes(report),
        prediction=prediction,
    )


def print_plan(loaded: LoadedRecipe, plan: Plan, run_dir: RunDirectory) -> None:
    """What `--dry-run` says: mesh, ranks and batch arithmetic."""
    import platform

    from ndtrain.plan.checks import describe_batch

    recipe = loaded.recipe
    print(f"run    {run_dir.path}")
    print(f"mesh   {plan.parallel}")
    if plan.parallel.cp > 1:
        print(f"cp     {plan.parallel.cp_method}")
    if plan.parallel.tp > 1:
        on = "on" if plan.parallel.sequence_parallel else "off"
        also = ", products while tokens travel" if plan.parallel.overlaps else ""
        print(f"tp     sequence parallelism {on}{also}")
    print(f"batch  {describe_batch(plan.batch, recipe.sequence_len, packed=recipe.sample_packing)}")
    for notice in (*loaded.notices, *plan.notices):
        print(f"note   {notice}")
    host = platform.node()
    for rank in range(plan.parallel.world_size):
        place = "  ".join(f"{axis} {at}" for axis, at in plan.parallel.coordinates(rank).items())
        print(f"rank {rank:<3} {host}  {place}")
