"""Token losses and their gradient in two passes over the logits, as one Triton kernel.

What the compiler makes of the formula moves as many bytes at half the rate; and it needs memory for
the gradient, which here takes the place of the logits. The first pass keeps a running maximum and
sum in every lane (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").

Shape letters: C tokens of a chunk, V vocabulary.
"""

import torch
import triton
import triton.language as tl

_MOST_LANES = 4096
_LANES_PER_WARP = 256


def loss_in_place(
    logits: torch.Tensor, targets: torch.Tensor, *, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss sum of the trained tokens, fp32, and its gradient by the logits, written over them.

    Args:
        logits: [C, V], contiguous; lost when `gradient`.
        targets: next tokens [C]; negative where nothing is trained.
        gradient: False leaves the logits as they are and returns them.
    """
    tokens, vocabulary = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    lanes = min(_MOST_LANES, triton.next_power_of_2(vocabulary))
    _kernel[(tokens,)](
        logits,
        targets,
        losses,
        vocabulary,
        LANES=lanes,
        GRADIENT=gradient,
        num_warps=max(1, min(16, lanes // _LANES_PER_WARP)),
    )
    return losses.sum(), logits


@triton.jit
def _kernel(logits, targets, losses, vocabulary, LANES: tl.constexpr, GRADIENT: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * vocabulary
    target = tl.load(targets + token)
    lanes = tl.arange(0, LANES)
    if target < 0:
        tl.store(losses + token, 0.0)
        if GRADIENT:
            nothing = tl.zeros((LANES,), logits.dtype.element_ty)
            for start in range(0, vocabulary, LANES):
                tl.store(row + start + lanes, nothing, mask=start + lanes < vocabulary)
    else:
        # read before any lane may write over it: the sums below wait for all lanes
        own = tl.load(row + target).to(tl.float32)
        # finite, so that lanes beyond a small vocabulary take no difference of infinities
        top = tl.full((LANES,), -1e30, tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        for start in range(0, vocabulary, LANES):
            here = start + lanes < vocabulary
            part = tl.load(row + start + lanes, mask=here, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, part)
            total = total * tl.exp(top - higher) + tl.exp(part - higher)
            top = higher
        highest = tl.max(top, 0)
        normaliser = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
        tl.store(losses + token, normaliser - own)
        if GRADIENT:
            for start in range(0, vocabulary, LANES):
                here = start + lanes < vocabulary
                part = tl.load(row + start + lanes, mask=here, other=0.0).to(tl.float32)
                found = tl.exp(part - normaliser) - (start + lanes == target).to(tl.float32)
                tl.store(row + start + lanes, found.to(logits.dtype.element_ty), mask=here)
