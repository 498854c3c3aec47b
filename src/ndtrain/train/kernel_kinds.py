"""What a kernel or an operator does, by its name."""

MATMUL = "matmul"
ATTENTION = "attention"
OPTIMIZER = "optimizer"
OTHER = "other kernels"
COPIES = "copies"
COMMUNICATION = "communication"

_GENERATED = "triton_"
_TEMPLATES = ("triton_tem", "triton_mm", "triton_bmm")
_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (COMMUNICATION, ("nccl", "gloo", "c10d")),
    # the last two are cuDNN's helpers around its backward pass
    (ATTENTION, ("sdpa", "attention", "flash", "fmha", "compute_dot_do_o", "convert_dq")),
    (
        MATMUL,
        # the last ones are operators of a host
        (
            *("gemm", "gemv", "nvjet", "cutlass", "wgmma", "cublas"),
            *("matmul", "aten::mm", "aten::bmm", "addmm", "baddbmm"),
        ),
    ),
    (OPTIMIZER, ("adam",)),
    (COPIES, ("memcpy", "memset", "copy_", "split_with_sizes", "catarray", "cat_")),
)


def kind_of(name: str) -> str:
    """The kind of a kernel; what no word gives away is one of the other kernels."""
    lowered = name.lower()
    if lowered.startswith(_TEMPLATES):
        return ATTENTION if "attention" in lowered else MATMUL
    # the compiler names a kernel after the operators it fuses, `_to_copy` and the like
    if lowered.startswith(_GENERATED):
        return OTHER
    for kind, words in _WORDS:
        if any(word in lowered for word in words):
            return kind
    return OTHER
