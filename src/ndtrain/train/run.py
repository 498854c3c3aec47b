"""One rank of a run: assembly only. The one place that knows every part.

Recipe -> mesh -> model -> rows -> checkpoint -> loop -> export.
"""

import contextlib

from ndtrain.data.prepare import open_prepared
from ndtrain.environment import LaunchedRank
from ndtrain.errors import CheckpointError, DivergedError, ExitCode
from ndtrain.launch.status import StatusWriter, rank_state_path
from ndtrain.model.adapters import report_trainable
from ndtrain.model.attention import describe_attention
from ndtrain.parallel.mesh import build_mesh
from ndtrain.parallel.runtime import Runtime, limit_waits, start, stop
from ndtrain.plan.hardware import find_gpu, local_gpus
from ndtrain.recipe.schema import Recipe
from ndtrain.report.events import Event, Notice, RunEnded, RunStarted, SamplesDone
from ndtrain.report.reporters import AllOf, build_reporters
from ndtrain.train.assemble import assemble
from ndtrain.train.checkpoint import Checkpointer
from ndtrain.train.feed import build_batches, build_evals
from ndtrain.train.finish import leave_model
from ndtrain.train.job import Job
from ndtrain.train.loop import Outcome, Run, fit, tell_saves
from ndtrain.train.memory_failure import explain_rank
from ndtrain.train.meter import Meter
from ndtrain.train.probe import check_isolation, check_untested
from ndtrain.train.profile import StepProfiler, read_steps
from ndtrain.train.resuming import go_on
from ndtrain.train.samples import Sampler
from ndtrain.train.stopping import Stopper
from ndtrain.train.timetable import build_timetable
from ndtrain.train.warm_up import WarmUp, may_compile


def run_rank(job: Job, launched: LaunchedRank | None) -> int:
    """Run one rank from its process group to its exit code."""
    recipe = job.recipe
    warm_up = WarmUp(may_compile(recipe))
    runtime = start(launched, device=recipe.device, timeout_seconds=recipe.ddp_timeout)
    failed = True
    try:
        warm_up.finish()
        code = _run(job, runtime)
        failed = False
    finally:
        stop(runtime, failed=failed)
    return code


def _run(job: Job, runtime: Runtime) -> int:
    status = _status(job, runtime)
    stopper = Stopper(
        max_seconds=job.max_seconds,
        state=(lambda: status.status.state) if runtime.is_main else None,
    )
    reporter = build_reporters(job.run_dir, job.recipe) if runtime.is_main else None
    try:
        code = _train(job, runtime, status, stopper, reporter)
    except BaseException as error:
        failure = explain_rank(job, runtime.rank, status.status, error)
        stopper.close()
        # the disk may be what failed: what cannot be written must not hide the error itself
        with contextlib.suppress(CheckpointError, OSError):
            if runtime.is_main:
                status.end(
                    "failed", int(getattr(failure, "exit_code", ExitCode.FAULT)), str(failure)
                )
        with contextlib.suppress(CheckpointError, OSError):
            if reporter is not None:
                reporter.close()
        if failure is error:
            raise
        raise failure from error
    stopper.close()
    if reporter is not None:
        reporter.close()
    return code


def _train(
    job: Job, runtime: Runtime, status: StatusWriter, stopper: Stopper, reporter: AllOf | None
) -> int:
    recipe = job.recipe

    def emit(event: Event) -> None:
        if reporter is not None:
            reporter.write(event)

    for text in (*job.loaded.notices, *job.plan.notices, *job.notices):
        emit(Notice(text))
    mesh = build_mesh(job.plan.parallel, runtime.device)
    limit_waits(runtime)
    engine = assemble(recipe, job.source, mesh, num_tokens=job.num_tokens)
    emit(Notice(engine.policy.describe()))
    if runtime.device.type == "cuda":
        fused, windows = engine.policy.segmented, engine.block_windows
        flash = recipe.flash_attention_impl
        emit(Notice(describe_attention(fused=fused, windows=windows, flash=flash)))
    elif recipe.flash_attention_impl is not None:
        emit(Notice(f"{recipe.flash_attention_impl} is for CUDA: attention runs without it here"))
    prepared = open_prepared(job.prepared)
    batches = build_batches(prepared.train, recipe, job.plan.batch, engine, shuffle=True)
    timetable = build_timetable(
        recipe, batches.steps_per_epoch, has_eval_rows=any(map(len, prepared.evals.values()))
    )
    checkpointer = Checkpointer(
        job.run_dir.path,
        runtime=runtime,
        run_id=job.run_id,
        limit=recipe.save_total_limit,
        asynchronous=recipe.save_async,
        trained_only=recipe.adapter is not None,
        about=job.about,
    )
    if timetable.saves:
        checkpointer.check_space(engine.trainable, engine.optimizer)
    progress, changed = go_on(job, checkpointer, engine, emit, restarted=runtime.attempt > 0)
    if recipe.sample_packing:
        check_isolation(engine)
    check_untested(engine)
    trained = report_trainable(engine.model)
    emit(
        RunStarted(
            run_dir=str(job.run_dir.path),
            start_step=progress.step,
            total_steps=timetable.total_steps,
            steps_per_epoch=batches.steps_per_epoch,
            mesh=dict(zip(("dp_replicate", "dp_shard", "cp", "tp"), mesh.plan.sizes, strict=True)),
            device=str(runtime.device.type),
            num_parameters=trained.total,
            num_trainable=trained.trainable,
            adapted=list(trained.adapted),
            changed=changed,
        )
    )
    if job.stop_after is not None and job.stop_after < timetable.total_steps:
        emit(
            Notice(
                f"This start ends after step {job.stop_after} of {timetable.total_steps} "
                "(--max-steps); the same command without it goes on."
            )
        )
    sampler = Sampler(engine, job.source) if recipe.sample_prompts else None

    def after_eval(step: int) -> None:
        answers = None if sampler is None else sampler.answer(stopped=stopper.agreed)
        if answers is not None:
            emit(SamplesDone(step, answers))

    run = Run(
        engine=engine,
        batches=batches,
        evals=build_evals(prepared, recipe, engine),
        timetable=timetable,
        progress=progress,
        checkpointer=checkpointer,
        stopper=stopper,
        status=status,
        meter=_meter(job, runtime, recipe),
        profiler=StepProfiler(
            read_steps(recipe.profile) if runtime.is_main else range(0),
            job.run_dir,
            runtime.device,
        ),
        emit=emit,
        stop_after=job.stop_after,
        last_saved=progress.step or None,
        after_eval=after_eval,
    )
    try:
        outcome = fit(run)
    except Exception as error:
        if runtime.world_size == 1 or isinstance(error, DivergedError):
            # every rank is here: what is being saved is lost if the process ends under it, and
            # a failure of its own must not hide this one
            with contextlib.suppress(CheckpointError, OSError):
                checkpointer.wait()
        raise
    finally:
        unfinished = run.profiler.close()
    if unfinished is not None:
        emit(Notice(unfinished))
    if reporter is not None:
        # the model card is written from the metrics
        reporter.tell_last_step()
    _finish(job, runtime, run, outcome)
    status.end("finished" if outcome.is_over else "stopped", int(outcome.exit_code))
    emit(RunEnded(outcome.reason, progress.step, int(outcome.exit_code)))
    return int(outcome.exit_code)


def _finish(job: Job, runtime: Runtime, run: Run, outcome: Outcome) -> None:
    """Complete the checkpoint in flight and leave the model for others."""
    run.checkpointer.wait()
    tell_saves(run)
    run.checkpointer.close()
    recipe, progress = job.recipe, run.progress
    if not recipe.export or outcome.exit_code != ExitCode.OK:
        return
    run.status.enter("exporting", step=progress.step)
    step = progress.step
    best = progress.best_step if recipe.load_best_model_at_end else None
    if best is not None and best != step:
        found = run.checkpointer.of_step(best)
        if found is None:
            text = f"The best model, of step {best}, has no whole checkpoint any more: step {step},"
            run.emit(Notice(f"{text} the last one, is exported instead."))
        else:
            run.checkpointer.load(found, run.engine.trainable)
            step = found.step
    leave_model(
        run.engine,
        job.source,
        job.run_dir,
        runtime=runtime,
        step=step,
        tell=lambda text: run.emit(Notice(text)),
    )


def _status(job: Job, runtime: Runtime) -> StatusWriter:
    path = job.run_dir.status
    if not runtime.is_main:
        path = rank_state_path(job.run_dir.logs, runtime.rank)
    return StatusWriter(path, job.run_id)


def _meter(job: Job, runtime: Runtime, recipe: Recipe) -> Meter:
    names = local_gpus() if runtime.device.type == "cuda" else ()
    known = [name for name in names if name != "unknown"]
    return Meter(
        device=runtime.device,
        world_size=runtime.world_size,
        facts=job.plan.facts,
        sequence_len=recipe.sequence_len,
        frozen=recipe.adapter is not None,
        output=job.run_dir.path,
        peak_tflops=find_gpu(known[0])[0].bf16_tf if known else None,
    )
