"""Kinds by the names that kernels of real runs have."""

import pytest

from ndtrain.train.kernel_kinds import kind_of

NAMES = {
    "matmul": (
        "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN",
        "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm>>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
        "triton_tem_fused_addmm_view_3",
        "triton_mm_12",
        "triton_bmm_2",
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
    ),
    "attention": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*)",
        "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)",
        "void cudnn::fusion::fmha_reduce_head<true>(void const*, void*)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>",
        "_flash_attention_forward_kernel",
        "triton_tem_fused_flex_attention_backward_view_4",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"
        "at::native::FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false>>",
        "aten::_fused_adamw_",
    ),
    "other kernels": (
        "triton_red_fused__to_copy_add_div_expand_mul_pow_sum_view_9",
        "triton_poi_fused___rshift____to_copy_add_copy__div_gt_isnan_mul_sqrt_sub_view_where_0",
        "triton_poi_fused__scaled_mm__to_copy_bitwise_and_clamp_mul_reciprocal_t_view_13",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"
        "at::native::(anonymous namespace)::TensorListMetadata<1>, at::native::LpNormFunctor<",
        "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>>",
    ),
    "copies": (
        "Memset (Device)",
        "Memcpy HtoD (Pinned -> Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<>",
        "void at::native::(anonymous namespace)::split_with_sizes_copy_out_contiguous_no_cast",
        "aten::copy_",
    ),
    "communication": (
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "gloo:all_reduce",
        "c10d::allreduce_",
    ),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, one) for kind in NAMES for one in NAMES[kind]])
def test_kind_of_a_real_name(kind: str, name: str) -> None:
    assert kind_of(name) == kind
