"""Builds a model's modules without memory for its weights: shapes and dtypes only (meta device)."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ndtrain.errors import MeshError, RecipeError
from ndtrain.plan.model_source import ModelSource
from ndtrain.recipe.schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_UNLISTED_KEYS = {"dtype", "head_dim", "rope_scaling", "rope_theta"}
"""Keys that architectures read although their config classes do not list them."""

_BUILD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    KeyError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


def build_model(
    source: ModelSource,
    recipe: Recipe,
    *,
    dtype: torch.dtype = torch.float32,
    num_tokens: int = 0,
) -> "PreTrainedModel":
    """The model on the meta device; weights come later, sliced, through `load_weights`.

    Args:
        source: a folder, a downloaded hub model or random weights (`ready_model` makes them so).
        recipe: the recipe, for `trust_remote_code`.
        dtype: of the parameters.
        num_tokens: size of the tokenizer; a smaller vocabulary is widened to it.

    Raises:
        MeshError: transformers does not know the architecture, or the config does not build.
        RecipeError: tokens were added that an adapter would leave untrained.
    """
    config = read_model_config(source, trust_remote_code=recipe.trust_remote_code)
    num_added = num_tokens - config.get_text_config().vocab_size
    widen_vocabulary(config, num_tokens)
    model = build_from_config(config, dtype=dtype, trust_remote_code=recipe.trust_remote_code)
    if recipe.adapter is not None and num_added > 0:
        _check_added_tokens(model, recipe, num_added)
    return model


def read_model_config(
    source: ModelSource, *, trust_remote_code: bool = False
) -> "PreTrainedConfig":
    """The transformers config of `source`, checked to be of a model that can be trained.

    Raises:
        MeshError: unknown architecture, quantised weights, or values that do not fit together.
    """
    _refuse_quantised(source)
    try:
        config = _read_config(source, trust_remote_code)
    except (OSError, *_BUILD_ERRORS) as error:
        raise _unusable(source, error) from error
    config.use_cache = False
    return config


def build_from_config(
    config: "PreTrainedConfig", *, dtype: torch.dtype, trust_remote_code: bool = False
) -> "PreTrainedModel":
    """The causal language model of a config, on the meta device."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
    except _BUILD_ERRORS as error:
        raise MeshError(
            f"the model of type '{config.model_type}' cannot be built: {_first_line(error)}",
            where="base_model",
            hint="Use a causal language model that this version of transformers knows.",
        ) from error
    model.tie_weights()
    return model


def widen_vocabulary(config: "PreTrainedConfig", num_tokens: int) -> None:
    """Makes room for tokens that were added to the tokenizer; never shrinks."""
    text = config.get_text_config()
    if num_tokens > text.vocab_size:
        text.vocab_size = num_tokens


def _check_added_tokens(model: "PreTrainedModel", recipe: Recipe, num_added: int) -> None:
    """An adapter leaves the embedding as it is; then added tokens would never mean anything."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if module in ends]
    leaves = [name.rpartition(".")[2] for name in names]
    unfrozen = any(re.search(one, f"{names[0]}.weight") for one in recipe.unfrozen_parameters)
    if not unfrozen and not set(recipe.lora_modules_to_save) & {leaves[0], names[0]}:
        raise RecipeError(
            f"the recipe adds {num_added} tokens, but an adapter does not train their embeddings.",
            where="lora_modules_to_save",
            hint=f"Set lora_modules_to_save: [{', '.join(leaves)}].",
        )


def _read_config(source: ModelSource, trust_remote_code: bool) -> "PreTrainedConfig":
    from transformers import AutoConfig

    if source.kind == "random":
        return _config_of(source.config)
    if source.path is None:
        raise MeshError(
            f"the model '{source.name}' is not on this machine yet.", where="base_model"
        )
    return AutoConfig.from_pretrained(str(source.path), trust_remote_code=trust_remote_code)


def _config_of(keys: Mapping[str, Any]) -> "PreTrainedConfig":
    from transformers import CONFIG_MAPPING

    values = {name: value for name, value in keys.items() if name != "model_type"}
    kind = str(keys["model_type"])
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"unknown model_type '{kind}'")
    config_class = CONFIG_MAPPING[kind]
    unknown = _unknown_keys(config_class(), values)
    if unknown:
        raise RecipeError(
            f"model_config: {kind} has no key {', '.join(repr(key) for key in unknown)}.",
            where="model_config",
            hint="Use the keys of transformers' config.json for this architecture.",
        )
    return config_class(**values)


def _unknown_keys(default: "PreTrainedConfig", values: Mapping[str, Any]) -> list[str]:
    known = set(default.to_dict()) | set(default.attribute_map) | _UNLISTED_KEYS
    return sorted(key for key in values if key not in known and not hasattr(default, key))


def _refuse_quantised(source: ModelSource) -> None:
    quantised = source.config.get("quantization_config")
    if isinstance(quantised, Mapping):
        method = quantised.get("quant_method", "an unknown method")
        raise MeshError(
            f"the weights of '{source.name}' are quantised with {method}, which cannot be trained.",
            where="base_model",
            hint="Name the unquantised model; load_in_4bit: true quantises it for QLoRA.",
        )


def _unusable(source: ModelSource, error: Exception) -> MeshError:
    kind = source.config.get("model_type", "?")
    if "trust_remote_code" in str(error) or source.config.get("auto_map"):
        return MeshError(
            f"'{source.name}' brings its own Python code, which is not run.",
            where="base_model",
            hint="Read that code, then set trust_remote_code: true.",
        )
    import transformers

    return MeshError(
        f"transformers {transformers.__version__} cannot use the model type '{kind}' of "
        f"'{source.name}': {_first_line(error)}",
        where="base_model" if source.kind != "random" else "model_config",
        hint="Upgrade transformers, or use another model.",
    )


def _first_line(error: Exception) -> str:
    """What went wrong, in one line; two where the first only announces the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return repr(error)
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
