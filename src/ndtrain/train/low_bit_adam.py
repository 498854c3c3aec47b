"""AdamW over weights and moments that are stored with fewer bits than they are computed in.

Everything is computed in fp32; what is stored in bf16 or 8 bits is rounded by chance, without
which bf16 loses every update below 1/256 of a weight, and a second moment never moves. One pass
over the memory a parameter: on CUDA the update of each shape is compiled into one kernel.

Shape letters: R leading dims of this rank's part of a parameter, C its last dim.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ndtrain.errors import RecipeError
from ndtrain.parallel.linear import local
from ndtrain.plan.small_states import block_length
from ndtrain.train.eight_bits import (
    blocks,
    decode_positive,
    decode_signed,
    encode_positive,
    encode_signed,
)
from ndtrain.train.rounding import (
    Places,
    chances,
    mix,
    other_bits,
    places_of,
    random_bits,
    round_to_bf16,
    upper_half,
)

_MOST_SHAPES = 64
"""Kernels that may be compiled: one for each shape and kind of states."""

ONE_PASS: dict[str, str | int | bool | Callable[..., Any]] = {"realize_reads_threshold": 64}
"""For the compiler: values that are read often would be written out between two kernels, and read
again, which takes five bytes an element with states in 8 bits."""


@dataclass(frozen=True)
class Rates:
    """Constants of the update: they are compiled into the kernel.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization, 2019, algorithm 2.
    """

    beta1: float
    beta2: float
    epsilon: float


class LowBitAdamW(Optimizer):
    """AdamW with states in fp32, bf16 or 8 bits over weights in fp32 or bf16.

    A step is left out where the attribute `found_inf`, a float on the device, is not 0, as in
    torch's own fused optimizers.

    Args:
        groups: parameter groups with `names` beside `params`: the noise of rounding is keyed by
            name.
        lr: learning rate of groups without one.
        betas: decay of the moments.
        eps: term that keeps the division finite.
        state_dtype: `fp32`, `bf16` or `8bit`.
        seed: of the run.

    Raises:
        RecipeError: tensor parallelism would cut the blocks that share a scale.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: str,
        seed: int,
    ) -> None:
        # "fused" tells the loop that a step can be left out by a flag on the device
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "fused": True}
        super().__init__(groups, defaults)
        self.gradient_factor: torch.Tensor | None = None
        """Scalar on the device that the gradients of the next steps are multiplied by."""
        self._state_dtype = state_dtype
        self._seed = seed
        self._places: dict[torch.Tensor, Places] = {}
        self._compiled: dict[Any, Callable[..., None]] = {}
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if state_dtype == "8bit":
                    _check_blocks(name, parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient.

        Args:
            closure: not used; the interface has it.
        """
        for group in self.param_groups:
            named = [
                (name, parameter)
                for name, parameter in zip(group["names"], group["params"], strict=True)
                if parameter.grad is not None
            ]
            if not named:
                continue
            for name, parameter in named:
                self._prepare(name, parameter)
            numbers, key = self._advance(group, [parameter for _, parameter in named])
            beta1, beta2 = group["betas"]
            rates = Rates(beta1, beta2, group["eps"])
            for _, parameter in named:
                self._update(parameter, numbers, key, rates)

    def _prepare(self, name: str, parameter: torch.Tensor) -> None:
        """Make the states of a parameter, and hash the places of its elements."""
        if parameter not in self._places:
            self._places[parameter] = places_of(parameter, name, self._seed)
        state = self.state[parameter]
        if state:
            return
        state["step"] = torch.zeros((), device=parameter.device)
        length = block_length(parameter.shape) if self._state_dtype == "8bit" else None
        if length is None:
            dtype = torch.bfloat16 if self._state_dtype == "bf16" else torch.float32
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
            return
        state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.int8)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.uint8)
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"{moment}_scale"] = _zero_scales(parameter, length)

    def _advance(
        self, group: dict[str, Any], parameters: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the step, and work out its numbers on the device.

        Returns:
            fp32 [5]: step size, one over the square root of the second moment's correction, decay,
            whether the step is left out, and the factor of gradients; int32 scalar: the key of its
            random bits.
        """
        steps = [self.state[parameter]["step"] for parameter in parameters]
        device = steps[0].device
        found, factor = getattr(self, "found_inf", None), self.gradient_factor
        skipped = torch.zeros((), device=device) if found is None else found.to(device).reshape(())
        torch._foreach_add_(steps, 1.0 - skipped)
        # all parameters of a group have taken the same steps
        count = steps[0].double()
        beta1, beta2 = group["betas"]
        rate = torch.full((), group["lr"], dtype=torch.float64, device=device)
        numbers = torch.stack(
            [
                rate / (1 - beta1**count),
                (1 - beta2**count).rsqrt(),
                rate * group["weight_decay"],
                skipped.double(),
                rate.new_ones(()) if factor is None else factor.to(rate),
            ]
        )
        return numbers.float(), mix(count.to(torch.int32))

    def _update(
        self, parameter: torch.Tensor, numbers: torch.Tensor, key: torch.Tensor, rates: Rates
    ) -> None:
        weight = local(parameter)
        if not weight.numel():
            return
        state = {name: local(value) for name, value in self.state[parameter].items()}
        places = self._places[parameter]
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        kernel = update_in_blocks if "exp_avg_scale" in state else update_plain
        moments = [value for name, value in sorted(state.items()) if name != "step"]
        self._on_device(kernel, weight.device)(
            weight, gradient, moments, places.rows, places.columns, numbers, key, rates
        )

    def _on_device(self, kernel: Callable[..., None], device: torch.device) -> Callable[..., None]:
        """The kernel, compiled for its shapes on CUDA."""
        if device.type != "cuda":
            return kernel
        if kernel not in self._compiled:
            limit = torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES)
            compiled = torch.compile(kernel, fullgraph=True, dynamic=False, options=ONE_PASS)
            self._compiled[kernel] = limit(compiled)
        return self._compiled[kernel]


def update_plain(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    moments: Sequence[torch.Tensor],
    rows: torch.Tensor,
    columns: torch.Tensor,
    numbers: torch.Tensor,
    key: torch.Tensor,
    rates: Rates,
) -> None:
    """Move one weight in place, with moments in fp32 or bf16.

    Args:
        weight: [R, C], fp32 or bf16.
        gradient: [R, C].
        moments: first and second, [R, C].
        rows: hashed places [R, 1].
        columns: hashed places [C].
        numbers: of the step, as `LowBitAdamW` works them out.
        key: of the step's random bits.
        rates: constants.
    """
    mean, square = moments
    bits = random_bits(rows, columns, key)
    old = weight.float(), mean.float(), square.float()
    new = _adam(*old, gradient.float(), numbers, rates)
    noise = bits, other_bits(bits), upper_half(bits)
    for stored, before, after, bits_of_it in zip(
        (weight, mean, square), old, new, noise, strict=True
    ):
        kept = torch.where(numbers[3] > 0, before, after)
        stored.copy_(round_to_bf16(kept, bits_of_it) if stored.dtype == torch.bfloat16 else kept)


def update_in_blocks(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    moments: Sequence[torch.Tensor],
    rows: torch.Tensor,
    columns: torch.Tensor,
    numbers: torch.Tensor,
    key: torch.Tensor,
    rates: Rates,
) -> None:
    """Move one weight in place, with moments in 8 bits.

    Args:
        weight: [R, C], fp32 or bf16.
        gradient: [R, C].
        moments: codes of the first [R, C] and its scales [R, N]; those of the second.
        rows: hashed places [R, 1].
        columns: hashed places [C].
        numbers: of the step, as `LowBitAdamW` works them out.
        key: of the step's random bits.
        rates: constants.
    """
    mean, mean_scale, square, square_scale = moments
    count = mean_scale.shape[-1]
    bits = blocks(random_bits(rows, columns, key), count)
    old = blocks(weight, count).float()
    new, first, second = _adam(
        old,
        decode_signed(blocks(mean, count), mean_scale),
        decode_positive(blocks(square, count), square_scale),
        blocks(gradient, count).float(),
        numbers,
        rates,
    )
    skipped = numbers[3] > 0
    kept = torch.where(skipped, old, new)
    if weight.dtype == torch.bfloat16:
        kept = round_to_bf16(kept, bits).to(weight.dtype)
    weight.copy_(kept.flatten(-2))
    encoded = (
        *encode_signed(first, chances(other_bits(bits))),
        *encode_positive(second, chances(upper_half(bits))),
    )
    for stored, value in zip(moments, encoded, strict=True):
        stored.copy_(torch.where(skipped, stored, value.reshape(stored.shape)))


def _adam(
    weight: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    gradient: torch.Tensor,
    numbers: torch.Tensor,
    rates: Rates,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight and moments after the step, all fp32; the moments are used before their rounding."""
    step_size, correction, decay = numbers[0], numbers[1], numbers[2]
    gradient = gradient * numbers[4]
    mean = mean + (1 - rates.beta1) * (gradient - mean)
    square = rates.beta2 * square + (1 - rates.beta2) * gradient * gradient
    moved = (
        weight - decay * weight - step_size * mean / (square.sqrt() * correction + rates.epsilon)
    )
    return moved, mean, square


def _zero_scales(parameter: torch.Tensor, length: int) -> torch.Tensor:
    """Scales of all blocks of a parameter, sharded like it."""
    shape = (*parameter.shape[:-1], parameter.shape[-1] // length)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, device=parameter.device)
    own = parameter.to_local()
    scales = torch.zeros((*own.shape[:-1], own.shape[-1] // length), device=own.device)
    return DTensor.from_local(
        scales,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def _check_blocks(name: str, parameter: torch.Tensor) -> None:
    length = block_length(parameter.shape)
    last = local(parameter).shape[-1] if parameter.ndim else 0
    if length is not None and last % length:
        raise RecipeError(
            f"8-bit states share a scale over {length} elements, and tensor parallelism leaves "
            f"this rank rows of {last} of '{name}'.",
            where="optimizer_state_dtype",
            hint="Use optimizer_state_dtype: bf16, or a tensor_parallel_size that divides evenly.",
        )
