"""Every moment of a profiled window is of one kind; the numbers are exact."""

import pytest

from ndtrain.train.step_account import KINDS, Span, StepAccount, account, covered, kinds_of

GEMM = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN"
FLASH = "void flash::flash_fwd_kernel"
FUSED = "triton_red_fused__to_copy_add_div_expand_mul_pow_sum_view_9"
NORM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::LpNormFunctor"
COPY = "Memcpy HtoD (Pinned -> Device)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def tell(
    *kernels: tuple[str, float, float],
    optimizer: tuple[tuple[float, float], ...] = (),
    fetches: tuple[tuple[float, float], ...] = (),
    window: tuple[float, float] = (0, 100),
) -> StepAccount:
    return account(
        [Span(*kernel) for kernel in kernels],
        optimizer=[Span("Optimizer.step#AdamW.step", *ends) for ends in optimizer],
        fetches=[Span("ndtrain: next batch", *ends) for ends in fetches],
        window=window,
    )


def spent(found: StepAccount) -> dict[str, float]:
    return {kind: time for kind, time in found.times.items() if time}


def test_kinds_are_told_in_one_order() -> None:
    found = tell((FUSED, 0, 10), (GEMM, 10, 20))
    assert tuple(found.times) == tuple(found.shares) == KINDS
    assert KINDS == (
        "matmul",
        "attention",
        "optimizer",
        "other kernels",
        "copies",
        "between kernels",
        "waiting for other ranks",
        "waiting for data",
        "waiting for the host",
    )


def test_kernels_and_what_is_left_are_the_window() -> None:
    found = tell((GEMM, 10, 40), (FLASH, 40, 60), (FUSED, 60, 65), (COPY, 70, 72))
    assert spent(found) == {
        "matmul": 30,
        "attention": 20,
        "other kernels": 5,
        "copies": 2,
        "between kernels": 5,
        "waiting for the host": 38,
    }
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-12)
    assert (found.window, found.communication) == (100, 0)


def test_short_pauses_are_the_devices_own() -> None:
    """Kernels that wait in its queue follow each other after a microsecond or two."""
    found = tell((FUSED, 0, 10), (GEMM, 11.5, 40), (GEMM, 45, 50), (COPY, 55.1, 100))
    assert spent(found) == pytest.approx(
        {
            "matmul": 33.5,
            "other kernels": 10,
            "copies": 44.9,
            "between kernels": 6.5,
            "waiting for the host": 5.1,
        }
    )


def test_a_moment_with_several_kernels_is_of_the_first_kind() -> None:
    found = tell((COPY, 0, 100), (FUSED, 10, 60), (GEMM, 20, 30), (FLASH, 25, 40), (GEMM, 22, 28))
    assert spent(found) == {"matmul": 10, "attention": 10, "other kernels": 30, "copies": 50}


def test_exchange_is_waiting_only_where_nothing_hides_it() -> None:
    found = tell((GATHER, 0, 30), (GATHER, 20, 50), (GEMM, 10, 40), (COPY, 45, 48))
    assert spent(found) == {
        "matmul": 30,
        "copies": 3,
        "waiting for other ranks": 17,
        "waiting for the host": 50,
    }
    assert (found.communication, found.hidden_communication) == (50, 33)


def test_waiting_for_data_is_what_a_fetch_leaves_idle() -> None:
    found = tell((GEMM, 10, 30), (GATHER, 60, 70), fetches=((0, 20), (50, 80)))
    assert spent(found) == {
        "matmul": 20,
        "waiting for other ranks": 10,
        "waiting for data": 30,
        "waiting for the host": 40,
    }


def test_a_kernel_inside_the_optimizers_span_is_the_optimizers() -> None:
    kernels = ((FUSED, 0, 10), (FUSED, 10, 20), (GEMM, 20, 30), (COPY, 30, 40), (GATHER, 40, 50))
    assert spent(tell(*kernels, optimizer=((10, 35), (20, 60)), window=(0, 50))) == {
        "optimizer": 30,
        "other kernels": 10,
        "waiting for other ranks": 10,
    }
    spans = [Span(NORM, 0, 4), Span(NORM, 6, 10)]
    assert kinds_of(spans, [Span("Optimizer.step#SGD.step", 5, 10)]) == [
        "other kernels",
        "optimizer",
    ]


def test_what_lies_outside_the_window_does_not_count() -> None:
    found = tell((GEMM, -10, 5), (FUSED, 95, 300), (GATHER, 200, 210), fetches=((-5, 8),))
    assert spent(found) == {
        "matmul": 5,
        "other kernels": 5,
        "waiting for data": 3,
        "waiting for the host": 87,
    }
    assert found.communication == 0


def test_a_window_without_kernels_is_the_hosts() -> None:
    assert spent(tell()) == {"waiting for the host": 100}
    assert spent(tell((GEMM, 3, 3))) == {"waiting for the host": 100}


def test_covered_counts_what_overlaps_once() -> None:
    spans = [Span("x", 0, 10), Span("x", 5, 20), Span("x", 40, 50)]
    assert covered(spans, (2, 45)) == 23
    assert covered([], (0, 1)) == 0


def test_a_large_trace_is_told_whole() -> None:
    names = (GEMM, FLASH, FUSED, COPY, GATHER)
    kernels = [(names[place % 5], place * 0.7, place * 0.7 + 3) for place in range(100_000)]
    found = tell(*kernels, optimizer=((100, 900),), fetches=((0, 1),), window=(0, 1e5))
    assert sum(found.shares.values()) == pytest.approx(1)
