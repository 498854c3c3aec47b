"""Recipe keys that say which model is trained, how it is adapted and in which precision."""

from typing import Any, Literal

from pydantic import Field

from ndtrain.recipe.base import RecipePart


class SpecialTokens(RecipePart):
    """Tokens with a role; a name that the vocabulary lacks is added to it."""

    bos_token: str | None = Field(None, description="Beginning-of-sequence token.")
    eos_token: str | None = Field(None, description="End-of-sequence token.")
    pad_token: str | None = Field(None, description="Padding token; padding is masked by position.")
    unk_token: str | None = Field(None, description="Token for unknown text.")
    additional_special_tokens: tuple[str, ...] = Field(
        (), description="Further special tokens, added when missing."
    )


class ModelKeys(RecipePart):
    """The base model and its tokenizer."""

    base_model: str | None = Field(
        None,
        description="Hub id, folder, .gguf file or package://<python package>/<file>.",
    )
    model_config_: dict[str, Any] | None = Field(
        None,
        alias="model_config",
        description="Instead of base_model: a transformers config (model_type, hidden_size, ...) "
        "whose weights are drawn from `seed`. For tests and benchmarks.",
    )
    tokenizer_config: str | None = Field(
        None,
        description="Tokenizer of another model; `bytes` is the built-in byte-level tokenizer. "
        "Default: the base model's own.",
    )
    revision_of_model: str | None = Field(None, description="Hub branch, tag or commit.")
    trust_remote_code: bool = Field(False, description="Run Python code that a model repo ships.")
    special_tokens: SpecialTokens | None = Field(None, description="Tokens with a role.")
    tokens: tuple[str, ...] = Field((), description="Ordinary tokens to add to the vocabulary.")
    unfrozen_parameters: tuple[str, ...] = Field(
        (),
        description="Regular expressions of parameter names to train; all others are frozen. With "
        "an adapter: what of the base is trained beside it.",
    )
    bf16: bool | Literal["auto"] = Field(
        "auto", description="Compute in bfloat16; auto = on CUDA devices that have it."
    )
    param_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Stored weights, and their gradients. bf16 halves both; AdamW then rounds its "
        "updates by chance, so that small ones are kept on average, and other optimizers lose "
        "them.",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="In which gradients are summed over data ranks. bf16 halves what is sent, and "
        "rounds each sum of ranks to 8 bits; micro-batches are added up in fp32 all the same.",
    )


class AdapterKeys(RecipePart):
    """Low-rank adapters, named as in Axolotl and peft."""

    adapter: Literal["lora", "qlora"] | None = Field(
        None, description="lora or qlora; unset = full fine-tuning."
    )
    lora_r: int = Field(16, ge=1, description="Rank of the adapters.")
    lora_alpha: float = Field(32, gt=0, description="Scale: updates are multiplied by alpha / r.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the adapters.")
    lora_target_modules: tuple[str, ...] | str | None = Field(
        None, description="Names of linears, a regular expression, or `all-linear`."
    )
    lora_target_linear: bool = Field(False, description="Adapt every linear except the head.")
    lora_modules_to_save: tuple[str, ...] = Field(
        (), description="Modules trained whole beside the adapters, e.g. embed_tokens, lm_head."
    )
    lora_model_dir: str | None = Field(None, description="Adapter to continue from.")
    peft_use_rslora: bool = Field(False, description="Scale by alpha / sqrt(r) (rsLoRA).")
    peft_use_dora: bool = Field(False, description="Magnitude-direction decomposition (DoRA).")
    peft_init_lora_weights: bool | str = Field(
        True, description="peft's init_lora_weights: true, false, gaussian or orthogonal."
    )
    loraplus_lr_ratio: float | None = Field(
        None, gt=0, description="Learning rate of B matrices over that of A matrices (LoRA+)."
    )
    load_in_4bit: bool = Field(False, description="Hold the frozen base in 4 bits (nf4).")
    load_in_8bit: bool = Field(False, description="Hold the frozen base in 8 bits.")
