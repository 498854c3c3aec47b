"""The loop: steps, evaluations, checkpoints and stops, told as events.

It takes finished objects, knows neither files nor terminals, and is the same on every rank; every
decision rests on numbers that all ranks share.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ndtrain.data.batch import StepBatch
from ndtrain.errors import ExitCode
from ndtrain.launch.status import StatusWriter
from ndtrain.report.events import OVER, CheckpointSaved, EvalDone, Event, Notice, StepDone
from ndtrain.train.assemble import Engine
from ndtrain.train.checkpoint import Checkpointer
from ndtrain.train.deferred import (
    DeferredNumbers,
    Stopwatch,
    flag_nonfinite,
    skips_on_device,
)
from ndtrain.train.divergence import check_finite, check_reading
from ndtrain.train.garbage import leave_out_what_lives
from ndtrain.train.meter import Meter
from ndtrain.train.optim import learning_rate_factor
from ndtrain.train.profile import StepProfiler
from ndtrain.train.state import Progress
from ndtrain.train.step import accumulate_gradients, discard_gradients, evaluation_loss, update
from ndtrain.train.stopping import Stopper, StopReason
from ndtrain.train.timetable import Timetable

_NOTHING_YET = (
    "The evaluation before the first step was cut off: there is nothing to save, and the next "
    "start makes it anew. Give it more time, or fewer held-out rows (val_set_size, samples)."
)


class Batches(Protocol):
    """Where steps come from."""

    def iterate(self, position: int, steps: int) -> Iterator[StepBatch]:
        """Consecutive steps from a row position on."""


@dataclass
class Run:
    """All that the loop works with.

    Attributes:
        evals: held-out steps of each dataset, made anew for each evaluation.
        stop_after: last step of this start.
        clock: when the last step ended; None after something that is no step.
        waiting: a step whose numbers have not been told yet.
    """

    engine: Engine
    batches: Batches
    evals: Mapping[str, Callable[[], Iterator[StepBatch]]]
    timetable: Timetable
    progress: Progress
    checkpointer: Checkpointer
    stopper: Stopper
    status: StatusWriter
    meter: Meter
    profiler: StepProfiler
    emit: Callable[[Event], None]
    stop_after: int | None = None
    last_saved: int | None = None
    clock: Stopwatch | None = None
    waiting: "_Told | None" = None
    after_eval: Callable[[int], None] = field(default=lambda step: None)


@dataclass(frozen=True)
class _Told:
    """A step that is done, or on its way to being done."""

    step: int
    seen_tokens: int
    factor: float
    batch: StepBatch
    numbers: DeferredNumbers


@dataclass(frozen=True)
class Outcome:
    """Why the loop came to its end."""

    reason: str
    exit_code: ExitCode

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to train."""
        return self.reason in OVER


def fit(run: Run) -> Outcome:
    """Train until the timetable, a stop or a failure ends it."""
    progress, timetable = run.progress, run.timetable
    last = timetable.total_steps
    if run.stop_after is not None:
        last = min(last, run.stop_after)
    if _has_stopped_early(run):
        run.emit(
            Notice(
                f"early_stopping_patience was used up at step {progress.step}: raise or remove it "
                "to train on."
            )
        )
        return Outcome("early_stopping", ExitCode.OK)
    owed = progress.owes_evaluation or (progress.step == 0 and last > 0)
    if owed and timetable.evaluates and (outcome := _judge(run)) is not None:
        return outcome
    run.status.enter("training", step=progress.step)
    steps = run.batches.iterate(progress.position, max(0, last - progress.step))
    watched = run.profiler.watch(steps, progress.step + 1, last)
    for number, batch in enumerate(watched):
        _step(run, batch)
        if number == 0:
            # everything is compiled, and the device still works
            leave_out_what_lives()
            run.clock = None
        tell_saves(run)
        if timetable.eval_is_due(progress.step) and (outcome := _judge(run)) is not None:
            return outcome
        if timetable.save_is_due(progress.step):
            save(run)
        if (reason := run.stopper.agreed()) is not None and progress.step < last:
            save(run)
            return Outcome(reason.name.lower(), reason.exit_code)
    settle(run)
    if progress.step < timetable.total_steps:
        save(run)
        return Outcome("max_steps", ExitCode.OK)
    return Outcome("finished", ExitCode.OK)


def _step(run: Run, batch: StepBatch) -> None:
    """One optimizer step; where the device works behind, its numbers are told a step later."""
    progress, engine = run.progress, run.engine
    if run.clock is None or run.profiler.is_starting(progress.step + 1):
        run.clock = Stopwatch(engine.mesh.device)
    factor = learning_rate_factor(engine.recipe, progress.step, run.timetable.total_steps)
    result = accumulate_gradients(engine, batch, progress.step, factor)
    if skips_on_device(engine.optimizer, engine.mesh.device):
        flag_nonfinite(engine.optimizer, result)
        update(engine, result)
    elif check_finite(engine, batch, progress, result, run.meter.output):
        update(engine, result)
    else:
        discard_gradients(engine)
    numbers = DeferredNumbers(result, run.clock)
    run.clock = numbers.ended
    progress.step += 1
    progress.position = batch.next_position
    progress.seen_tokens += batch.num_targets
    run.status.beat(progress.step)
    told = _Told(progress.step, progress.seen_tokens, factor, batch, numbers)
    if engine.mesh.device.type == "cuda":
        before, run.waiting = run.waiting, told
        if before is not None:
            _tell(run, before)
    else:
        _tell(run, told)
    if run.profiler.is_last(progress.step):
        settle(run)
        run.status.enter("training", "writing the profile", step=progress.step)
        for event in run.profiler.finish(run.meter):
            run.emit(event)
        run.status.enter("training", step=progress.step)
        # the time of writing it is no step's
        run.clock = None


def settle(run: Run) -> None:
    """Tell of a step whose numbers were still on their way."""
    waiting, run.waiting = run.waiting, None
    if waiting is not None:
        _tell(run, waiting)


def _tell(run: Run, told: "_Told") -> None:
    """Read a step's numbers and report them."""
    reading = told.numbers.read()
    if skips_on_device(run.engine.optimizer, run.engine.mesh.device):
        check_reading(run.engine, told.batch, run.progress, reading, told.step, run.meter.output)
    batch, engine = told.batch, run.engine
    rates = run.meter.rates(batch, reading.seconds)
    run.emit(
        StepDone(
            step=told.step,
            epoch=batch.epoch,
            loss=reading.loss,
            grad_norm=reading.grad_norm,
            lr=engine.recipe.learning_rate * told.factor,
            tokens=batch.num_targets,
            seen_tokens=told.seen_tokens,
            step_seconds=reading.seconds,
            tokens_per_second=rates.tokens_per_second,
            tokens_per_second_per_device=rates.per_device,
            tflops_per_device=rates.tflops_per_device,
            mfu=rates.mfu,
            memory_gib=run.meter.memory_gib(),
        )
    )


def _judge(run: Run) -> Outcome | None:
    """Evaluate, and save what is the best; a reason to end here, if there is one."""
    progress = run.progress
    cut_off = evaluate(run)
    progress.owes_evaluation = cut_off is not None
    if cut_off is not None:
        if progress.step > 0:
            save(run)
        else:
            run.emit(Notice(_NOTHING_YET))
        return Outcome(cut_off.name.lower(), cut_off.exit_code)
    if _has_stopped_early(run):
        save(run)
        return Outcome("early_stopping", ExitCode.OK)
    if run.timetable.saves_best and progress.best_step == progress.step:
        save(run)
    return None


@dataclass
class _Watch:
    """Hands out an evaluation's batches until a stop cuts it off."""

    stopper: Stopper
    cut_off: StopReason | None = None

    def until_stopped(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        for batch in batches:
            self.cut_off = self.stopper.agreed()
            if self.cut_off is not None:
                return
            yield batch


def evaluate(run: Run) -> StopReason | None:
    """Loss over all held-out rows; remembers the best.

    Returns:
        The stop that cut it off; what was computed until then is dropped.
    """
    settle(run)
    watch = _Watch(run.stopper)
    progress = run.progress
    run.status.enter("evaluating", f"evaluating at step {progress.step}", step=progress.step)
    total, tokens = 0.0, 0
    by_dataset = {}
    for name, batches in run.evals.items():
        loss, count = evaluation_loss(run.engine, watch.until_stopped(batches()))
        if watch.cut_off is not None:
            return watch.cut_off
        by_dataset[name] = loss
        total, tokens = total + loss * count, tokens + count
    loss = total / max(1, tokens)
    # of the model before training there is no checkpoint
    if progress.step > 0:
        _remember_best(progress, loss)
    run.emit(EvalDone(progress.step, loss, tokens, by_dataset))
    run.after_eval(progress.step)
    run.status.enter("training", step=progress.step)
    # the time of an evaluation is no step's
    run.clock = None
    return None


def _remember_best(progress: Progress, loss: float) -> None:
    if progress.best_loss is None or loss < progress.best_loss:
        progress.best_loss, progress.best_step = loss, progress.step
        progress.evals_without_gain = 0
    else:
        progress.evals_without_gain += 1


def _has_stopped_early(run: Run) -> bool:
    """Whether the last evaluation has used up the patience; a run that was taken up says it too."""
    patience = run.engine.recipe.early_stopping_patience
    return patience is not None and run.progress.evals_without_gain >= patience


def save(run: Run) -> None:
    """Start a checkpoint of this step, unless there is one."""
    settle(run)
    step = run.progress.step
    if run.last_saved == step:
        return
    run.status.enter("saving", f"saving step {step}", step=step)
    run.checkpointer.save(step, run.engine.trainable, run.engine.optimizer, run.progress)
    run.last_saved = step
    in_background = run.checkpointer.is_saving
    stage = f"training while step {step} is saved" if in_background else "training"
    run.status.enter("training", stage, step=step)
    tell_saves(run)


def tell_saves(run: Run) -> None:
    """Report checkpoints that have become complete."""
    saved = run.checkpointer.poll()
    for done in saved:
        run.emit(CheckpointSaved(done.step, str(done.path), done.seconds, done.blocked_seconds))
    if saved and run.status.status.state == "training" and not run.checkpointer.is_saving:
        run.status.enter("training", step=run.progress.step)
