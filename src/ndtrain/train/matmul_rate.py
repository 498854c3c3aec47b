"""What one large matrix product reaches on a card: the mark that a step is held against."""

import torch

_SIZE = 8192
_WARM_UPS = 3
_REPEATS = 10
_NO_ROOM = "CUBLAS_STATUS_ALLOC_FAILED"


def matmul_tflops(device: torch.device) -> float | None:
    """TFLOP/s of a bf16 product of two square matrices of 8192; None when the card has no room.

    It takes 384 MiB and some 20 ms, draws nothing from the run's own random numbers and exchanges
    nothing with other ranks.
    """
    random = torch.Generator(device).manual_seed(0)
    begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    try:
        left, right = (
            torch.randn(_SIZE, _SIZE, dtype=torch.bfloat16, device=device, generator=random)
            for _ in range(2)
        )
        product = torch.empty_like(left)
        for repeat in range(_WARM_UPS + _REPEATS):
            if repeat == _WARM_UPS:
                begun.record()
            torch.mm(left, right, out=product)
    except RuntimeError as error:
        # cuBLAS has an allocation of its own, and its own word for a full card
        if isinstance(error, torch.OutOfMemoryError) or _NO_ROOM in str(error):
            return None
        raise
    ended.record()
    ended.synchronize()
    seconds = float(begun.elapsed_time(ended)) / 1000
    return 2 * _SIZE**3 * _REPEATS / seconds / 1e12
