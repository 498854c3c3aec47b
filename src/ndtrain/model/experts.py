"""How a mixture's experts are multiplied, which depends on the widths that a rank holds."""

from torch import nn
from transformers import PreTrainedModel

from ndtrain.model.grouped_experts import NAME, register_grouped_experts

_ROW_BYTES = 16
"""One matrix product over all experts needs rows of a multiple of so many bytes."""


def use_experts(causal_lm: PreTrainedModel, *, tp: int, item_size: int) -> bool:
    """Multiply expert by expert where one product over all of them cannot take their widths.

    Args:
        causal_lm: the model; one without experts stays as it is.
        tp: ranks that share each expert.
        item_size: bytes of a number in a matrix product.

    Returns:
        Whether a block's work is the same whatever the tokens, so that it can be compiled whole.
    """
    if not any(_is_fused(parameter) for parameter in causal_lm.parameters()):
        return True
    config = causal_lm.config
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    if fits_grouped_product(config.hidden_size, width, tp=tp, item_size=item_size):
        register_grouped_experts()
        causal_lm.set_experts_implementation(NAME)
        return True
    causal_lm.set_experts_implementation("eager")
    return False


def fits_grouped_product(hidden_size: int, width: int, *, tp: int, item_size: int) -> bool:
    """Whether rows of an expert's matrices are as long as the grouped product needs them."""
    return all(size * item_size % _ROW_BYTES == 0 for size in (hidden_size, width // tp))


def _is_fused(parameter: nn.Parameter) -> bool:
    """The matrices of all experts are kept as one parameter [experts, rows, columns]."""
    return parameter.ndim == 3
